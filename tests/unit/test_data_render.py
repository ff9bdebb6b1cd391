"""Rendering: masks against spans drawn by hand, in three styles of template; continuations against whole renderings.

In a drawn text the assistant's spans stand between « and ». The test tokenizer has one token per special token and per
byte, so the expected tokens and mask follow from the drawing alone; merges are added where a border is to be crossed.
"""

import json
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from megatron_rl.config import ConfigError, DataError
from megatron_rl.data.render import ChatRenderer, load_tokenizer

CHATML = """
{%- if tools %}{{- '<|im_start|>system\n<tools>' }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}
{{- '</tools><|im_end|>\n' }}{%- endif %}
{%- for message in messages %}
  {%- if message.role == 'tool' %}
    {%- if loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
    {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
    {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
  {%- else %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {%- if message.reasoning_content %}{{- '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}{%- endif %}
    {{- message.content }}
    {%- for call in message.tool_calls or [] %}
      {{- '<tool_call>' + (call.function | tojson) + '</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""

HEADERS = """
{{- bos_token }}
{%- for message in messages %}
  {%- set role = 'ipython' if message.role == 'tool' else message.role %}
  {{- '<|start_header_id|>' + role + '<|end_header_id|>\n\n' + message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"""

MARKED = """
{%- for message in messages %}
  {%- if message.role == 'assistant' %}
    {{- '[A]' }}{% generation %}{{ message.content }}{% endgeneration %}{{ '</s>' }}{{ '\n' }}
  {%- else %}{{- '[U]' + message.content + '\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '[A]' }}{%- endif %}"""
MARKED_WITH_END = MARKED.replace(
    "{% endgeneration %}{{ '</s>' }}{{ '\n' }}", "{{ '</s>' }}{{ '\n' }}{% endgeneration %}"
)

SPECIAL = {
    CHATML: ("<|im_end|>", "<|im_start|>", "<|endoftext|>", "<think>", "</think>", "<tool_call>", "</tool_call>"),
    HEADERS: ("<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|end_of_text|>"),
    MARKED: ("</s>", "[A]", "[U]", "<|endoftext|>"),
    MARKED_WITH_END: ("</s>", "[A]", "[U]", "<|endoftext|>"),
}
"""Template -> special tokens, the end-of-turn token first."""


def make_tokenizer(
    template: str, merges: Sequence[tuple[str, str]] = (), *, special: Sequence[str] = (), nfc: bool = False
) -> PreTrainedTokenizerFast:
    """Byte-level BPE with the given merges and no word borders, so that a merge may cross whatever it meets."""
    special = special or SPECIAL[template]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*special, *alphabet, *(a + b for a, b in merges)]
    bpe = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=list(merges)))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.post_processor = processors.ByteLevel(trim_offsets=True)
    bpe.decoder = decoders.ByteLevel()
    if nfc:
        bpe.normalizer = normalizers.NFC()
    bpe.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=special[0], bos_token=special[1], chat_template=template
    )


def drawn(text: str, template: str) -> tuple[str, list[int], list[bool]]:
    """(text without the drawing, token ids, mask), by nothing but the drawing, the special tokens and UTF-8."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    character_of_byte = {v: chr(b) if v != chr(b) else v for b, v in bytes_to_unicode().items()}
    assert len(character_of_byte) == len(alphabet) == 256
    special = SPECIAL[template]
    ids: list[int] = []
    mask: list[bool] = []
    inside = False
    for piece in re.split("(" + "|".join(map(re.escape, special)) + "|[«»])", text):
        if piece in ("«", "»"):
            inside = piece == "«"
            continue
        if piece in special:
            new = [special.index(piece)]
        else:
            new = [len(special) + alphabet.index(bytes_to_unicode()[b]) for b in piece.encode()]
        ids += new
        mask += [inside] * len(new)
    return re.sub("[«»]", "", text), ids, mask


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def call(arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "arguments": arguments}}


TOOL = {"type": "function", "function": {"name": "f"}}

CASES: dict[str, tuple[str, list[dict[str, Any]], list[dict[str, Any]], str]] = {
    "chatml: thinking, one turn": (
        CHATML,
        [user("Hü"), assistant("Ja", reasoning_content="hm")],
        [],
        "<|im_start|>user\nHü<|im_end|>\n<|im_start|>assistant\n«<think>\nhm\n</think>\n\nJa<|im_end|>»\n",
    ),
    "chatml: calls as text and as object, two results in one turn, no content": (
        CHATML,
        [
            user("a"),
            assistant(None, tool_calls=[call('{"x": 1.5}')]),
            {"role": "tool", "content": "r"},
            {"role": "tool", "content": "s"},
            assistant("b", tool_calls=[call({"x": "ö"})]),
            {"role": "tool", "content": "t"},
            assistant("c"),
        ],
        [TOOL],
        '<|im_start|>system\n<tools>{"type": "function", "function": {"name": "f"}}</tools><|im_end|>\n'
        "<|im_start|>user\na<|im_end|>\n"
        '<|im_start|>assistant\n«<tool_call>{"name": "f", "arguments": {"x": 1.5}}</tool_call><|im_end|>»\n'
        "<|im_start|>user\n<tool_response>\nr\n</tool_response>\n<tool_response>\ns\n</tool_response><|im_end|>\n"
        '<|im_start|>assistant\n«b<tool_call>{"name": "f", "arguments": {"x": "ö"}}</tool_call><|im_end|>»\n'
        "<|im_start|>user\n<tool_response>\nt\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n«c<|im_end|>»\n",
    ),
    "chatml: end-of-text and end-of-turn tokens inside turns are ordinary": (
        CHATML,
        [user("a<|endoftext|>b<|im_end|>"), assistant("c<|im_end|>d<|endoftext|>"), user("e"), assistant("<|im_end|>")],
        [],
        "<|im_start|>user\na<|endoftext|>b<|im_end|><|im_end|>\n<|im_start|>assistant\n"
        "«c<|im_end|>d<|endoftext|><|im_end|>»\n"
        "<|im_start|>user\ne<|im_end|>\n<|im_start|>assistant\n«<|im_end|><|im_end|>»\n",
    ),
    "chatml: an answer that looks like a header, an empty one, whitespace at the borders": (
        CHATML,
        [user("x"), assistant("<|im_start|>assistant\ny"), user("x"), assistant(""), user("x"), assistant(" \n z \n")],
        [],
        "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n«<|im_start|>assistant\ny<|im_end|>»\n"
        "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n«<|im_end|>»\n"
        "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n« \n z \n<|im_end|>»\n",
    ),
    "headers: system, tool and two turns, emoji of several code points": (
        HEADERS,
        [
            {"role": "system", "content": "S"},
            user("q"),
            assistant("👩\u200d🚀é"),
            {"role": "tool", "content": "4"},
            assistant("  v "),
        ],
        [],
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nq<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n«👩\u200d🚀é<|eot_id|>»"
        "<|start_header_id|>ipython<|end_header_id|>\n\n4<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n«v<|eot_id|>»",
    ),
    "headers: the assistant speaks first": (
        HEADERS,
        [assistant("hi"), user("q"), assistant("a")],
        [],
        "<|begin_of_text|><|start_header_id|>assistant<|end_header_id|>\n\n«hi<|eot_id|>»"
        "<|start_header_id|>user<|end_header_id|>\n\nq<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n«a<|eot_id|>»",
    ),
    "marked, end-of-turn token behind the block": (
        MARKED,
        [user("a"), assistant("b</s>"), user("c"), assistant("d<|endoftext|>e"), user("f"), assistant("")],
        [],
        "[U]a\n[A]«b</s></s>»\n[U]c\n[A]«d<|endoftext|>e</s>»\n[U]f\n[A]«</s>»\n",
    ),
    "marked, end-of-turn token and the template's newline inside the block": (
        MARKED_WITH_END,
        [user("a"), assistant("b\n"), user("c"), assistant("d<|endoftext|>")],
        [],
        "[U]a\n[A]«b\n</s>»\n[U]c\n[A]«d<|endoftext|></s>»\n",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_mask_is_the_span_drawn_by_hand(name: str) -> None:
    template, messages, tools, drawing = CASES[name]
    renderer = ChatRenderer(make_tokenizer(template))
    text, expected_ids, expected_mask = drawn(drawing, template)
    token_ids, loss_mask = renderer.conversation(messages, tools)
    assert renderer.decode(token_ids.tolist()) == text
    assert token_ids.tolist() == expected_ids and token_ids.dtype == np.int32
    assert loss_mask.tolist() == expected_mask and loss_mask.dtype == np.bool_


@pytest.mark.parametrize("name", CASES)
def test_prompt_and_continuations_join_to_the_tokens_of_the_whole_conversation(name: str) -> None:
    template, messages, tools, _ = CASES[name]
    renderer = ChatRenderer(make_tokenizer(template, [("Ċ", "Ċ"), ("e", "r")]))
    token_ids, loss_mask = renderer.conversation(messages, tools)
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    starts = np.flatnonzero(np.diff(loss_mask.astype(int), prepend=0) == 1)
    ends = np.flatnonzero(np.diff(loss_mask.astype(int), append=0) == -1)
    prompt = renderer.prompt_ids(messages[: turns[0]], tools)
    assert prompt == token_ids[: starts[0]].tolist()
    for number, (before, after) in enumerate(pairwise(turns)):
        continuation = renderer.continuation_ids(messages[before + 1 : after], tools)
        assert continuation == token_ids[ends[number] + 1 : starts[number + 1]].tolist()


def test_ids_are_those_of_transformers() -> None:
    for template, messages, tools, _ in CASES.values():
        tokenizer = make_tokenizer(template, [("Ċ", "Ċ"), ("e", "r"), ("u", "s")])
        plain = [dict(m, content=m["content"] or "") for m in messages]
        for message in plain:
            for one in message.get("tool_calls", []):
                arguments = one["function"]["arguments"]
                message["tool_calls"] = [call(json.loads(arguments) if isinstance(arguments, str) else arguments)]
        options: dict[str, Any] = {"tools": tools or None, "return_dict": True}
        encoded: Any = tokenizer.apply_chat_template(plain, **options)
        assert ChatRenderer(tokenizer).conversation(messages, tools)[0].tolist() == encoded["input_ids"]


QWEN3 = CHATML.replace("message.reasoning_content %}", "message.reasoning_content and loop.last %}")
"""Drops the reasoning of earlier turns, as reasoning models' templates do."""


def test_a_template_that_looks_ahead_is_exact() -> None:
    renderer = ChatRenderer(make_tokenizer(QWEN3, special=SPECIAL[CHATML]))
    one = [user("a"), assistant("b", reasoning_content="r")]
    text = (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n«b<|im_end|>»\n"
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n«<think>\nr\n</think>\n\nb<|im_end|>»\n"
    )
    _, ids, mask = drawn(text, CHATML)
    token_ids, loss_mask = renderer.conversation([*one, *one])
    assert (token_ids.tolist(), loss_mask.tolist()) == (ids, mask)


@pytest.mark.parametrize(
    ("merge", "answer"),
    [
        pytest.param(("Ċ", "H"), "Hi", id="letter joins the header's newline"),
        pytest.param(("Ċ", "Ċ"), "\nHi", id="newline joins the header's newline"),
        pytest.param(("Ċ", "Ã"), "ü", id="first byte of a character joins the header's newline"),
    ],
)
def test_a_token_over_the_border_is_refused(merge: tuple[str, str], answer: str) -> None:
    renderer = ChatRenderer(make_tokenizer(CHATML, [merge]))
    with pytest.raises(DataError, match=r"one reaches over the border between .*assistant"):
        renderer.conversation([user("a"), assistant(answer)])
    token_ids, mask = renderer.conversation([user("a"), assistant("ok" + answer)])
    assert renderer.decode(token_ids[mask].tolist()) == f"ok{answer}<|im_end|>"


def test_a_space_that_joins_the_answer_is_refused_although_its_offset_is_trimmed() -> None:
    template = CHATML.replace("assistant\n", "assistant ").replace("message.role + '\n'", "message.role + ' '")
    special = SPECIAL[CHATML]
    with pytest.raises(DataError, match=r"one reaches over the border between .*'Hi"):
        ChatRenderer(make_tokenizer(template, [("Ġ", "H")], special=special)).conversation([user("a"), assistant("Hi")])
    _, mask = ChatRenderer(make_tokenizer(template, [("Ġ", "a")], special=special)).conversation(
        [user("a"), assistant("Hi")]
    )
    assert mask.sum() == 3


def test_a_combining_character_that_composes_with_the_header_is_refused() -> None:
    template = CHATML.replace("assistant\n", "assistante").replace("message.role + '\n'", "message.role + 'e'")
    renderer = ChatRenderer(make_tokenizer(template, special=SPECIAL[CHATML], nfc=True))
    assert renderer.conversation([user("a"), assistant("Hi")])[1].sum() == 3
    with pytest.raises(DataError, match="one reaches over the border"):
        renderer.conversation([user("a"), assistant("\u0301Hi")])


def test_a_template_that_marks_only_some_turns_is_refused() -> None:
    last_only = MARKED.replace("message.role == 'assistant'", "message.role == 'assistant' and loop.last").replace(
        "{%- else %}", "{%- elif message.role == 'assistant' %}{{- '[A]' + message.content + '</s>\n' }}{%- else %}"
    )
    renderer = ChatRenderer(make_tokenizer(last_only, special=SPECIAL[MARKED]))
    assert renderer.conversation([user("a"), assistant("b")])[1].sum() == 2
    with pytest.raises(DataError, match="got 1 blocks for 2 messages"):
        renderer.conversation([user("a"), assistant("b")] * 2)


def test_a_conversation_that_starts_with_the_assistant_never_trains_token_zero() -> None:
    bare = "{% for message in messages %}{{ message.content + '</s>' }}{% endfor %}"
    renderer = ChatRenderer(make_tokenizer(bare, special=SPECIAL[MARKED]))
    assert renderer.conversation([assistant("abc")])[1].tolist() == [False, True, True, True]


def test_bad_conversations_are_data_errors() -> None:
    refusing = CHATML + "{%- if messages[0].content == 'no' %}{{- raise_exception('never no') }}{%- endif %}"
    renderer = ChatRenderer(make_tokenizer(refusing, special=SPECIAL[CHATML]))
    with pytest.raises(DataError, match="the chat template refuses the conversation: never no"):
        renderer.conversation([user("no"), assistant("b")])
    with pytest.raises(DataError, match="got half of a surrogate pair"):
        renderer.conversation([user("\ud800"), assistant("b")])
    for arguments in ("{x", "[1]", None):
        with pytest.raises(DataError, match="must be an object or its JSON text, got"):
            renderer.conversation([user("a"), assistant("b", tool_calls=[call(arguments)])])


def test_messages_are_left_as_they_were() -> None:
    messages = [user("a"), assistant(None, tool_calls=[call('{"x": 1}')])]
    before = json.dumps(messages)
    ChatRenderer(make_tokenizer(CHATML)).conversation(messages)
    assert json.dumps(messages) == before


def test_stop_tokens_are_those_of_generation_config_and_tokenizer(tmp_path: Path) -> None:
    make_tokenizer(CHATML).save_pretrained(tmp_path)
    assert ChatRenderer(load_tokenizer(tmp_path)).stop_token_ids == (0,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    renderer = ChatRenderer(load_tokenizer(str(tmp_path)))
    assert renderer.stop_token_ids == (2, 0) and renderer.pad_id == 2
    token_ids, mask = renderer.conversation([user("a"), assistant("b<|endoftext|>")])
    assert renderer.decode(token_ids[mask].tolist()) == "b<|endoftext|><|im_end|>"
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 9999}')
    with pytest.raises(
        ConfigError, match=r"eos_token_id in .*generation_config.json must be tokens below \d+, got \[9999"
    ):
        ChatRenderer(load_tokenizer(tmp_path))


def test_a_turn_that_ends_in_no_stop_token_is_refused_at_once() -> None:
    wrong = ("<|endoftext|>", *(token for token in SPECIAL[CHATML] if token != "<|endoftext|>"))
    with pytest.raises(ConfigError, match=r"end an assistant turn with one of .*got '<\|im_end.*add its end-of-turn"):
        ChatRenderer(make_tokenizer(CHATML, special=wrong))


def test_a_template_without_tool_messages_serves_conversations_without_them() -> None:
    silent = HEADERS.replace(
        "{%- for message in messages %}", "{%- for message in messages if message.role != 'tool' %}"
    )
    renderer = ChatRenderer(make_tokenizer(silent, special=SPECIAL[HEADERS]))
    assert renderer.continuation_ids([user("hi")])
    with pytest.raises(ConfigError, match="must render tool messages"):
        renderer.continuation_ids([{"role": "tool", "content": "4"}])


def test_a_template_whose_replies_depend_on_what_was_said_before_is_refused() -> None:
    numbered = CHATML.replace("{{- message.content }}", "{{- (loop.index ~ ': ') + message.content }}")
    with pytest.raises(ConfigError, match="render a user message alike after any conversation"):
        ChatRenderer(make_tokenizer(numbered, special=SPECIAL[CHATML]))


def test_folders_without_tokenizer_or_template_are_config_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"must be a Hugging Face folder, got .*missing"):
        load_tokenizer(tmp_path / "missing")
    with pytest.raises(ConfigError, match=r"must hold a tokenizer that transformers can load.*copy tokenizer.json"):
        load_tokenizer(tmp_path)
    tokenizer = make_tokenizer(CHATML)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"must have a chat template, got none; add chat_template.jinja"):
        load_tokenizer(tmp_path)
