"""Tokens that reach over borders, templates that give no exact spans, effort, and masks after packing."""

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron_rl.config import ConfigError, DataError
from megatron_rl.data.conversation import Conversation
from megatron_rl.data.effort_template import EFFORT_SENTENCES, extend_template
from megatron_rl.data.packing import pack_for_ranks
from megatron_rl.data.render import ChatRenderer, MaskConfig
from megatron_rl.records import Sample

CHAT = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "chat_templates.py")))
user, assistant, result, call = (getattr(CHAT, name) for name in ("user", "assistant", "result", "call"))
QWEN3, GLM45 = CHAT.template("qwen3"), CHAT.template("glm45")
ANSWER, REASONING = MaskConfig(train="answer"), MaskConfig(train="reasoning")
Message = dict[str, Any]


def row(messages: list[Message], effort: str | None = None) -> Conversation:
    return Conversation("rows:1", messages, [], effort)


def made(folder: Path, *changes: tuple[str, str], merges: list[tuple[str, str]] | None = None) -> ChatRenderer:
    """Qwen3's template with texts replaced."""
    template = QWEN3
    for old, new in changes:
        assert old in template
        template = template.replace(old, new)
    return ChatRenderer(CHAT.make_tokenizer("qwen3", folder, merges or [], chat_template=template))


def trained(renderer: ChatRenderer, messages: list[Message], mask: MaskConfig) -> str:
    rendered = renderer.render(row(messages), mask)
    return renderer.decode(rendered.token_ids[rendered.loss_mask].tolist())


def test_a_token_of_text_and_whitespace_goes_with_the_text(tmp_path: Path) -> None:
    renderer = made(tmp_path, merges=[(".", "Ċ"), ("Ċ", "Ċ")])
    messages = [user("q"), assistant("mid.", "hm.", [call("f", x="a.\n")]), result("1."), assistant("end.", "r.")]
    assert trained(renderer, messages, ANSWER) == (
        'mid.\n<tool_call>\n{"name": "f", "arguments": {"x": "a.\\n"}}\n</tool_call><|im_end|>end.<|im_end|>'
    )
    assert trained(renderer, messages, REASONING) == "<think>\nhm.\n</think>\n\n<think>\nr.\n</think>\n\n"
    spans = renderer.render(row(messages), parts=True).spans
    assert [span.kind for span in spans if span.trained][:3] == ["reasoning", "answer", "tool_call"]


@pytest.mark.parametrize(
    ("merge", "answer"),
    [
        pytest.param(("Ċ", "J"), "Ja", id="letter joins the newline"),
        pytest.param(("Ċ", "Ã"), "über", id="first byte of a character joins the newline"),
    ],
)
def test_a_token_of_the_separating_whitespace_and_an_answer_goes_with_the_answer(
    merge: tuple[str, str], answer: str, tmp_path: Path
) -> None:
    renderer = made(tmp_path, merges=[merge])
    messages = [user("q"), assistant(answer, "r")]
    assert trained(renderer, messages, ANSWER) == f"\n{answer}<|im_end|>"
    assert trained(renderer, messages, REASONING) == "<think>\nr\n</think>\n"


def test_a_token_of_a_mark_and_an_answer_is_refused_only_where_parts_are_needed(tmp_path: Path) -> None:
    renderer = made(tmp_path, (r"'\n</think>\n\n'", r"'\n</think>='"), merges=[("=", "J"), ("ð", "Ł")])
    messages = [user("q"), assistant("Ja", "r")]
    assert trained(renderer, messages, MaskConfig()) == "<think>\nr\n</think>=Ja<|im_end|>"
    with pytest.raises(
        DataError, match=r"^rows:1: a token must start where .* the border between '.*</think>=' and 'Ja"
    ):
        renderer.render(row(messages), ANSWER)
    shown = renderer.render(row(messages), parts=True).spans
    assert [span.kind for span in shown if span.trained] == ["turn", "end_of_turn"]
    assert trained(renderer, [user("q"), assistant("👩", "👩")], ANSWER) == "👩<|im_end|>"


PROMPT = "{{- '<|im_start|>assistant\\n' }}\n    {%- if enable"
THINKING_PROMPT = PROMPT, PROMPT.replace("assistant\\n", "assistant\\n<think>\\n")
CONTENT = "'\\n</think>\\n\\n' + content.lstrip('\\n')"


@pytest.mark.parametrize(
    ("changes", "messages", "reason"),
    [
        pytest.param(
            [("{%- set content = message.content %}", "{%- set content = message.content | replace('m', 'n') %}")],
            [user("q"), assistant("a")],
            r"cannot give exact assistant spans: with a word at the borders of each message it .*put \{% generation",
            id="changes the text",
        ),
        pytest.param(
            [(CONTENT, f"{CONTENT} + content")],
            [user("q"), assistant("a")],
            r"cannot give exact assistant spans: it renders the content of messages\[1\] twice",
            id="renders a text twice",
        ),
        pytest.param(
            [(CONTENT, "'\\n</think>\\n\\n' + content[:9]")],
            [user("q"), assistant("a" * 12)],
            r"cannot give exact assistant spans: it renders only a part of the content of messages\[1\]",
            id="cuts a text",
        ),
        pytest.param(
            [
                (
                    "{%- elif message.role == 'assistant' %}",
                    "{%- elif message.role == 'assistant' and not message.name %}",
                )
            ],
            [user("q"), {**assistant("no"), "name": "x"}, user("r"), assistant("yes")],
            r"cannot give exact assistant spans: it leaves out messages\[1\]",
            id="leaves a turn out",
        ),
        pytest.param(
            [THINKING_PROMPT],
            [user("q"), assistant("a", "r"), user("r"), assistant("b", "s")],
            r"must begin with the generation prompt '<\|im_start\|>assistant\\n<think>\\n', but it has",
            id="asks for reasoning that earlier turns do not have",
        ),
        pytest.param(
            [THINKING_PROMPT],
            [user("<|im_start|>assistant\n<think>\n"), assistant("a", "r"), user("r"), assistant("b", "s")],
            r"must begin with the generation prompt '<\|im_start\|>assistant\\n<think>\\n', but it has",
            id="asks for reasoning that earlier turns do not have, though a user wrote it",
        ),
    ],
)
def test_a_template_without_exact_spans_is_refused_with_the_reason(
    changes: list[tuple[str, str]], messages: list[Message], reason: str, tmp_path: Path
) -> None:
    renderer = made(tmp_path, *changes)
    with pytest.raises(DataError, match=r"^rows:1: .*" + reason):
        renderer.render(row(messages))


def test_a_prompt_that_opens_the_reasoning_trains_what_follows(tmp_path: Path) -> None:
    renderer = made(tmp_path, THINKING_PROMPT)
    assert trained(renderer, [user("q"), assistant("a", "r")], MaskConfig()) == "r\n</think>\n\na<|im_end|>"
    assert trained(renderer, [user("q"), assistant("a", "r")], REASONING) == "r\n</think>\n\n"


def test_an_example_turn_in_the_templates_own_prompt_is_no_turn(tmp_path: Path) -> None:
    example = "<|im_start|>assistant\nexample<|im_end|>\n"
    renderer = ChatRenderer(CHAT.make_tokenizer("qwen3", tmp_path, chat_template=example + QWEN3))
    assert trained(renderer, [user("q"), assistant("a", "r")], MaskConfig()) == "<think>\nr\n</think>\n\na<|im_end|>"


def test_reasoning_whose_end_is_not_told_from_calls_is_refused_only_where_parts_are_needed(tmp_path: Path) -> None:
    change = (
        "{%- set content = message.content %}",
        "{%- set content = '' if message.tool_calls else message.content %}",
    )
    renderer = made(tmp_path, change)
    messages = [user("q"), assistant("", "r", [call("f", x=1)])]
    assert trained(renderer, messages, MaskConfig()).startswith("<think>\nr\n</think>\n\n<tool_call>")
    with pytest.raises(DataError, match=r"must close the reasoning of messages\[1\] before its tool calls"):
        renderer.render(row(messages), ANSWER)


def test_calls_that_a_template_writes_by_name_are_refused_only_where_their_borders_are_needed(tmp_path: Path) -> None:
    renderer = made(
        tmp_path, ('\'<tool_call>\\n{"name": "\'', "('<f>' if function.name == 'f' else '<tool_call>\\n{\"name\": \"')")
    )
    tools = [CHAT.tool("f", x="number"), CHAT.tool("g", x="number")]
    messages = [user("q"), assistant("a", "r", [call("f", x=1), call("g", x="1")])]
    conversation = Conversation("rows:1", messages, tools)
    assert not renderer.render(conversation).loss_mask.any()
    with pytest.raises(
        DataError, match=r"where each tool call of messages\[1\] starts, but it writes calls of 'f' in a way"
    ):
        renderer.render(conversation, MaskConfig(wrong_tool_calls="mask_call"))


def test_reasoning_alone_needs_a_template_that_renders_it(tmp_path: Path) -> None:
    renderer = ChatRenderer(CHAT.make_tokenizer("llama3", tmp_path))
    with pytest.raises(ConfigError, match=r"mask\.train reasoning needs a chat template that renders"):
        renderer.render(row([user("q"), assistant("a", "r")]), REASONING)


def test_what_a_template_leaves_out_is_named(tmp_path: Path) -> None:
    renderer = made(tmp_path)
    two = [user("q"), assistant("a", "r"), user("q"), assistant("<think>s</think>b"), user("q"), assistant("c", "t")]
    assert renderer.render(row(two)).not_rendered == (
        "messages[1].reasoning_content",
        "messages[3].content up to </think>",
    )
    (tmp_path / "llama3").mkdir()
    llama = ChatRenderer(CHAT.make_tokenizer("llama3", tmp_path / "llama3"))
    left_out = llama.render(row([user("q"), assistant("a", "r", [call("f", x=1)])])).not_rendered
    assert left_out == ("messages[1].reasoning_content", "messages[1].content")


def test_effort_reaches_the_template_or_is_refused(tmp_path: Path) -> None:
    messages = [user("q"), assistant("a", "r")]
    plain = made(tmp_path)
    extended = ChatRenderer(CHAT.make_tokenizer("qwen3", tmp_path, chat_template=extend_template(QWEN3)))
    base = plain.render(row(messages))
    assert extended.render(row(messages)).token_ids.tolist() == base.token_ids.tolist()
    for effort, sentence in EFFORT_SENTENCES.items():
        rendered = extended.render(row(messages, effort))
        text = extended.decode(rendered.token_ids.tolist())
        assert text.count(sentence) == 1 and text.index(sentence) < text.index("user\n") and rendered.effort == effort
        assert extended.decode(rendered.token_ids[rendered.loss_mask].tolist()) == "<think>\nr\n</think>\n\na<|im_end|>"
    with pytest.raises(DataError, match=r"^rows:1: .*ignores reasoning_effort = low; .*megatron-rl effort-template"):
        plain.render(row(messages, "low"))


def test_the_source_stands_once_in_front_of_errors(tmp_path: Path) -> None:
    renderer = made(tmp_path)
    with pytest.raises(DataError, match=r"^rows:1: arguments of a tool call must be an object"):
        renderer.render(row([user("q"), assistant("a", None, [{"name": "f", "arguments": "[1]"}])]))


def test_packed_and_unpacked_conversations_train_the_same_tokens_after_the_same_context(tmp_path: Path) -> None:
    renderer = ChatRenderer(CHAT.make_tokenizer("glm45", tmp_path))
    conversations = [
        [user("a"), assistant("b" * n, "r"), user("c"), assistant("<|user|>", "s", [call("f", x=n)])]
        for n in range(1, 9)
    ]
    rendered = [renderer.render(row(messages), ANSWER) for messages in conversations]
    samples = [Sample(sample_id=str(i), token_ids=r.token_ids, loss_mask=r.loss_mask) for i, r in enumerate(rendered)]
    # The token at t is predicted from everything before it, which a set of (context, token) pairs says exactly.
    alone = sorted(
        (r.token_ids[:t].tolist(), int(r.token_ids[t])) for r in rendered for t in np.flatnonzero(r.loss_mask)
    )
    packed = []
    for batches in pack_for_ranks(samples, capacity=400, data_parallel_size=2, pad_multiple=4, pad_id=0):
        for batch in batches:
            starts = np.asarray(batch.cu_seqlens)
            for t in np.flatnonzero(batch.loss_mask):
                first = int(starts[np.searchsorted(starts, t, side="right") - 1])
                packed.append((batch.input_ids[first : t + 1].tolist(), int(batch.target_ids[t])))
    assert sorted(packed) == alone
