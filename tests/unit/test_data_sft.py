"""SFT rows: each kind of wrong row is named by file and line; right ones become samples."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatron_rl.config import DataError
from megatron_rl.data.render import ChatRenderer
from megatron_rl.data.sft import load_conversations, sft_samples

TEMPLATE = """
{%- for message in messages %}{{- '<' + message.role + '>' + message.content + '</s>' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<assistant>' }}{%- endif %}"""
GOOD: dict[str, Any] = {"messages": [{"role": "user", "content": "hü"}, {"role": "assistant", "content": "ja"}]}


@pytest.fixture(scope="module")
def renderer() -> ChatRenderer:
    alphabet = ["</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    bytes_only = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    bytes_only.add_special_tokens([AddedToken("</s>", special=True)])
    return ChatRenderer(PreTrainedTokenizerFast(tokenizer_object=bytes_only, eos_token="</s>", chat_template=TEMPLATE))


def write(path: Path, *lines: Any) -> Path:
    """One line each: bytes as they are, anything else as JSON."""
    path.write_bytes(b"".join((x if isinstance(x, bytes) else json.dumps(x).encode()) + b"\n" for x in lines))
    return path


def row(*messages: Any, **more: Any) -> dict[str, Any]:
    return {"messages": list(messages), **more}


USER = {"role": "user", "content": "x"}
ANSWER = {"role": "assistant", "content": "y"}

BAD_ROWS = {
    "malformed": (b'{"messages": [', "must be one JSON object, got malformed JSON: Expecting value at column 15"),
    "a number too long": (b"9" * 5000, "must be one JSON object, got malformed JSON"),
    "nested without end": (b"[" * 100_000, "must be one JSON object, got malformed JSON"),
    "not UTF-8": (b'{"a": "\xff"}', "must be UTF-8 text, got byte 0xff"),
    "a list": ([1, 2], r"must be a JSON object, got \[1, 2\]"),
    "no messages": ({"text": "hi"}, r'must have messages, a list with at least one, got the keys \["text"\]'),
    "empty messages": ({"messages": []}, r"a list with at least one, got \[\]"),
    "messages of another kind": ({"messages": "hi"}, 'a list with at least one, got "hi"'),
    "a message that is text": (row("hi"), r'messages\[0\] must be an object with role and content, got "hi"'),
    "unknown role": (
        row(USER, {"role": "bot", "content": "y"}),
        r"messages\[1\].role must be one of system, .*\"bot\"",
    ),
    "no role": (row({"content": "y"}), r"messages\[0\].role must be one of .*got null"),
    "content in parts": (
        row(USER, {"role": "assistant", "content": [{"type": "text"}]}),
        r"messages\[1\].content must",
    ),
    "no content": (row({"role": "user"}, ANSWER), r"messages\[0\].content must be text, got null"),
    "an answer of nothing": (row(USER, {"role": "assistant", "content": None}), r"messages\[1\].content must be text"),
    "no assistant turn": (row(USER), "must have an assistant turn, got none"),
    "tools as an object": (row(USER, ANSWER, tools={"name": "f"}), 'tools must be a list .*got {"name": "f"}'),
    "tools of text": (row(USER, ANSWER, tools=["f"]), r'tools must be a list .*got \["f"\]'),
    "calls of a user": (row({**USER, "tool_calls": []}, ANSWER), "tool_calls belong to assistant messages, got them"),
    "calls of another kind": (row(USER, {**ANSWER, "tool_calls": "f"}), r"tool_calls must be a list, got \"f\""),
    "a call without name": (row(USER, {**ANSWER, "tool_calls": [{"function": {}}]}), r"tool_calls\[0\] must have a"),
    "a call with broken arguments": (
        row(USER, {**ANSWER, "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}),
        "arguments of a tool call must be an object",
    ),
    "half a character": (row({"role": "user", "content": "\ud800"}, ANSWER), "half of a surrogate pair"),
    "longer than the context": (row(USER, {**ANSWER, "content": "y" * 90}), "context_length = 100 tokens, got 110;"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_bad_row_is_named_by_file_and_line(name: str, tmp_path: Path, renderer: ChatRenderer) -> None:
    line, message = BAD_ROWS[name]
    path = write(tmp_path / "rows.jsonl", GOOD, b"", line, GOOD)
    with pytest.raises(DataError, match=message) as caught:
        sft_samples(path, renderer, context_length=100)
    text = str(caught.value)
    assert text.startswith(f"{path}:3: ") and "; " in text and "\n" not in text and len(text) < 400


def test_a_missing_an_unreadable_and_an_empty_file_are_named(tmp_path: Path, renderer: ChatRenderer) -> None:
    with pytest.raises(DataError, match=r"none.jsonl must be readable, got No such file"):
        sft_samples(tmp_path / "none.jsonl", renderer, context_length=100)
    with pytest.raises(DataError, match=r"must be readable, got Is a directory"):
        sft_samples(tmp_path, renderer, context_length=100)
    with pytest.raises(DataError, match=r"empty.jsonl must have at least one conversation, got none"):
        sft_samples(write(tmp_path / "empty.jsonl", b"", b"  "), renderer, context_length=100)


def test_rows_are_read_one_at_a_time(tmp_path: Path) -> None:
    rows = load_conversations(write(tmp_path / "rows.jsonl", GOOD, b"{"))
    assert next(rows).messages == GOOD["messages"]
    with pytest.raises(DataError, match=r"rows\.jsonl:2"):
        next(rows)


def test_a_row_becomes_a_sample_with_its_place_as_id(tmp_path: Path, renderer: ChatRenderer) -> None:
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    line_separator = row({"role": "user", "content": "a\u2028b"}, ANSWER, tools=None)
    lines = [b"\xef\xbb\xbf" + json.dumps(GOOD).encode(), b"", json.dumps(line_separator, ensure_ascii=False).encode()]
    path = write(tmp_path / "rows.jsonl", *lines, row(USER, call))
    samples = sft_samples(path, renderer, context_length=25)
    assert [sample.sample_id for sample in samples] == [f"{path}:1", f"{path}:3", f"{path}:4"]
    trained = [renderer.decode(sample.token_ids[sample.loss_mask].tolist()) for sample in samples]
    assert trained == ["ja</s>", "y</s>", "</s>"]
    assert renderer.decode(samples[0].token_ids.tolist()) == "<user>hü</s><assistant>ja</s>"
    assert [len(sample.token_ids) for sample in samples] == [24, 25, 20]
    with pytest.raises(DataError, match=r"rows.jsonl:3: .*context_length = 24 tokens, got 25"):
        sft_samples(path, renderer, context_length=24)
