"""Templates that say the effort: what they render is what the plain template renders of messages with the sentence."""

import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from megatron_rl import cli
from megatron_rl.config import ConfigError
from megatron_rl.data.conversation import EFFORTS, Conversation
from megatron_rl.data.effort_template import (
    EFFORT_SENTENCES,
    check_extension,
    extend_template,
    uses_effort,
)
from megatron_rl.data.mask import MaskConfig
from megatron_rl.data.render import ChatRenderer

CHAT = runpy.run_path(str(Path(__file__).parents[1] / "chat_templates.py"))
NAMES = ("qwen3", "glm45", "llama3")
TEMPLATES = {name: CHAT["template"](name) for name in NAMES}
TEMPLATES["tiny"] = (Path(cli.__file__).parent / "tiny_chat.jinja").read_text(encoding="utf-8").rstrip("\n")
Message = dict[str, Any]


def blocks(template: str, messages: list[Message], **variables: Any) -> tuple[str, list[tuple[int, int]]]:
    """(text, character spans of generation blocks)."""
    marked = "{%- generation" in template
    variables = {"bos_token": "<s>", **variables}
    rendered: Any = render_jinja_template(
        [messages], chat_template=template, return_assistant_tokens_mask=marked, **variables
    )
    texts, spans = rendered
    return texts[0], spans[0] if spans else []


def render(template: str, messages: list[Message], **variables: Any) -> str:
    return blocks(template, messages, **variables)[0]


def with_sentence(messages: list[Message], effort: str) -> list[Message]:
    """The messages as a person would add the sentence."""
    sentence = EFFORT_SENTENCES[effort]
    if messages[0]["role"] != "system":
        return [{"role": "system", "content": sentence}, *messages]
    content = messages[0]["content"]
    return [{**messages[0], "content": f"{content}\n\n{sentence}" if content else sentence}, *messages[1:]]


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
words = st.text("abü \n<>{}%#", min_size=1, max_size=12)


@st.composite
def conversations(draw: st.DrawFn) -> list[Message]:
    messages: list[Message] = [{"role": "system", "content": draw(texts)}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(texts)})
        answer = {"role": "assistant", "content": draw(texts)}
        if draw(st.booleans()):
            answer["reasoning_content"] = draw(texts)
        messages.append(answer)
    return messages


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=40, deadline=None)
@given(messages=conversations(), effort=st.sampled_from(EFFORTS), with_tools=st.booleans(), prompt=st.booleans())
def test_the_effort_is_one_sentence_in_the_system_message_and_nothing_else(
    name: str, messages: list[Message], effort: str, with_tools: bool, prompt: bool
) -> None:
    plain, extended = TEMPLATES[name], extend_template(TEMPLATES[name])
    tools = [CHAT["tool"]("f", x="number")] if with_tools else None
    options = {"tools": tools, "add_generation_prompt": prompt}
    for absent in ({}, {"reasoning_effort": None}):
        assert blocks(extended, messages, **options, **absent) == blocks(plain, messages, **options)
    got = blocks(extended, messages, **options, reasoning_effort=effort)
    assert got == blocks(plain, with_sentence(messages, effort), **options)


@pytest.fixture(scope="module")
def renderers(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[ChatRenderer, ChatRenderer]]:
    """Template name -> renderers of it and of it extended."""
    from transformers import AutoTokenizer

    found = {}
    for name in NAMES:
        folders = [tmp_path_factory.mktemp(name) for _ in range(2)]
        pair = [
            CHAT["make_tokenizer"](name, folder, chat_template=text)
            for folder, text in zip(folders, (TEMPLATES[name], extend_template(TEMPLATES[name])), strict=True)
        ]
        found[name] = (ChatRenderer(pair[0]), ChatRenderer(pair[1]))
    extended, plain = (AutoTokenizer.from_pretrained(tiny / "model") for _ in range(2))
    assert extended.chat_template == extend_template(TEMPLATES["tiny"])
    plain.chat_template = TEMPLATES["tiny"]
    found["tiny"] = (ChatRenderer(plain), ChatRenderer(extended))
    return found


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_trained_tokens_are_the_same_at_every_effort(
    renderers: dict[str, tuple[ChatRenderer, ChatRenderer]], name: str
) -> None:
    plain, extended = renderers[name]
    for opening in ([], [{"role": "system", "content": "Rules: ü"}]):
        messages = [
            *opening,
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": "two", "reasoning_content": "hm hm"},
        ]
        expected = plain.render(Conversation("a:1", messages, []), MaskConfig())
        trained = np.asarray(expected.token_ids)[expected.loss_mask]
        for effort in (None, *EFFORTS):
            got = extended.render(Conversation("a:1", messages, [], effort), MaskConfig())
            np.testing.assert_array_equal(np.asarray(got.token_ids)[got.loss_mask], trained)
            text = extended.decode(got.token_ids.tolist())
            shown = [level for level, sentence in EFFORT_SENTENCES.items() if sentence in text]
            assert shown == ([effort] if effort else [])


OPENINGS = [
    "",
    "\n",
    "  ",
    "\n\n  ",
    "text\n",
    "  {# a #}\n",
    "\t{% if true %}x{% endif %}\n",
    "  {%- if true %}y{% endif %}",
]


@pytest.mark.parametrize("opening", OPENINGS)
@pytest.mark.parametrize(
    "rest", ["{{ messages[0].content }}", "  {% for m in messages %}\n {{ m.role }}\n{% endfor %}\n"]
)
def test_whitespace_at_a_templates_start_is_left_alone(opening: str, rest: str) -> None:
    template = opening + rest
    messages = [{"role": "user", "content": " a"}]
    assert render(extend_template(template), messages) == render(template, messages)


@settings(max_examples=40, deadline=None)
@given(words, words)
@example("\n", "x")
def test_any_text_in_front_of_a_template_is_left_alone(opening: str, content: str) -> None:
    template = opening.replace("{", "(") + "{{ messages[0].content }}"
    messages = [{"role": "user", "content": content}]
    assert render(extend_template(template), messages) == render(template, messages)


def test_a_system_message_of_text_parts_gets_another_part() -> None:
    template = extend_template("{{ messages | tojson }}")
    parts = [{"type": "text", "text": "Rules"}]
    text = render(template, [{"role": "system", "content": parts, "name": "boss"}], reasoning_effort="low")
    added = '{"type": "text", "text": "\\n\\nReasoning effort: low."}'
    assert text == f'[{{"role": "system", "content": [{{"type": "text", "text": "Rules"}}, {added}], "name": "boss"}}]'
    empty = render(template, [{"role": "system", "content": None}], reasoning_effort="low")
    assert empty == '[{"role": "system", "content": "Reasoning effort: low."}]'


def test_an_unknown_effort_is_refused_by_the_template() -> None:
    with pytest.raises(TemplateError, match="one of none, low, medium, high, got max"):
        render(extend_template("x"), [{"role": "user", "content": "a"}], reasoning_effort="max")


def test_own_sentences_may_hold_any_character() -> None:
    sentences = {"low": "Überlege \"kurz\" 🥨 '{{'.", "high": "Überlege\nlang \\n."}
    extended = extend_template("{{ messages[0].content }}", sentences)
    for effort, sentence in sentences.items():
        assert render(extended, [{"role": "user", "content": "a"}], reasoning_effort=effort) == sentence


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_templates_pass_their_own_check_and_are_not_extended_twice(name: str) -> None:
    extended = extend_template(TEMPLATES[name])
    check_extension(TEMPLATES[name], extended, render)
    with pytest.raises(ConfigError, match="must not read reasoning_effort yet"):
        extend_template(extended)


def test_only_the_variable_itself_counts_as_use() -> None:
    assert uses_effort("{% if reasoning_effort == 'low' %}x{% endif %}")
    assert not uses_effort("{# reasoning_effort #} reasoning_effort {{ 'reasoning_effort' }}")
    with pytest.raises(ConfigError, match="must be Jinja"):
        uses_effort("{{ 'open")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for m in messages %}{{ raise_exception('No!') if m.role == 'system' }}{% endfor %}", "it says: No!"),
        ("{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}", "comes 0 times"),
        ("{% for m in messages + messages %}{{ m.content }}{% endfor %}", "comes 2 times"),
        ("{{ undefined_function() }}", "a short conversation"),
    ],
)
def test_a_template_that_cannot_carry_the_effort_is_refused_with_the_reason(template: str, reason: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_extension(template, extend_template(template), render)
    assert reason in str(error.value)
