"""Rows to distil from: checked, with what they are known by and the language and domain they belong to."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import xxhash

from megatron_rl.config import DataError
from megatron_rl.data.conversation import Conversation, conversation_of, shown
from megatron_rl.data.distill.config import DistillConfig
from megatron_rl.data.endpoint_answer import Message
from megatron_rl.data.rows import Rows, iterate

_STALE = ("effort",)
"""Columns that say something about a reasoning which is now another."""


@dataclass(frozen=True)
class SourceRow:
    """One usable row."""

    source: str
    """File and line."""
    sample_id: str
    """The column id, or a digest of messages and tools."""
    key: str
    """What its answers depend on besides the settings: sample_id and a digest of the rest."""
    messages: list[Message]
    """What is asked: the prompt, or the whole conversation."""
    tools: list[dict[str, Any]]
    language: str
    domain: str
    columns: dict[str, Any]
    """The row's other columns, which go along; without a label of effort, as the reasoning changes."""


Parse = Callable[[str, Mapping[str, Any]], SourceRow]


def usable_rows(rows: Rows, parse: Parse, limit: int | None) -> Iterator[SourceRow | DataError]:
    """The first rows, or what is wrong with one, in order and one at a time."""
    for source, row in islice(iterate(rows), limit):
        if isinstance(row, DataError):
            yield row
            continue
        try:
            yield parse(source, row)
        except DataError as error:
            yield error


def prompt_of(source: str, row: Mapping[str, Any], config: DistillConfig) -> SourceRow:
    """A row to be answered: it ends in a user or tool message, or in an assistant turn, which is left out."""
    messages = row.get("messages")
    if isinstance(messages, list) and messages and _role(messages[-1]) != "assistant":
        row = {**row, "messages": [*messages, {"role": "assistant", "content": ""}]}
    conversation = conversation_of(source, row)
    prompt = conversation.messages[:-1]
    last = prompt[-1]["role"] if prompt else "nothing"
    if last not in ("user", "tool"):
        raise DataError(
            f"{source}: what comes before the answer must end in a user or tool message, got {last}; mend the row or "
            "leave it out"
        )
    return _source_row(conversation, prompt, row, config)


def whole_row(source: str, row: Mapping[str, Any], config: DistillConfig) -> SourceRow:
    """A row whose turns stay."""
    conversation = conversation_of(source, row)
    return _source_row(conversation, conversation.messages, row, config)


def output_row(row: SourceRow, messages: list[Message], **columns: Any) -> dict[str, Any]:
    """What is written: id, messages and tools, then the further columns, which replace the row's own."""
    known = {"id": row.sample_id, "messages": messages}
    if row.tools:
        known["tools"] = row.tools
    return known | row.columns | {"language": row.language, "domain": row.domain} | columns


def dumped(value: Any) -> bytes:
    """One JSON line; a type that JSON lacks, such as a date of Parquet, becomes its text."""
    return json.dumps(value, ensure_ascii=False, default=str).encode() + b"\n"


def digest(value: Any) -> str:
    """32 hexadecimal digits of a JSON value, whatever the order of its keys."""
    text = json.dumps(value, ensure_ascii=False, sort_keys=True, default=str)
    return xxhash.xxh3_128_hexdigest(text.encode("utf-8", "surrogatepass"))


def _source_row(
    conversation: Conversation, messages: list[Message], row: Mapping[str, Any], config: DistillConfig
) -> SourceRow:
    source, tools = conversation.source, conversation.tools
    language = _text(source, row, "language") or config.language.default
    domain = _text(source, row, "domain") or config.domain
    asked = digest([messages, tools])
    sample_id = _sample_id(source, row.get("id"), asked)
    known = {"id", "messages", "tools", "language", "domain", *_STALE}
    columns = {name: value for name, value in row.items() if name not in known}
    try:
        dumped([sample_id, language, domain, messages, tools, columns])
    except UnicodeEncodeError:
        raise DataError(f"{source}: a row must be Unicode text, got half of a surrogate pair; mend it") from None
    key = f"{sample_id}:{digest([asked, language, domain])}"
    return SourceRow(source, sample_id, key, messages, tools, language, domain, columns)


def _sample_id(source: str, value: Any, default: str) -> str:
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise DataError(f"{source}: id must be text or a whole number, got {shown(value)}; mend it or leave it out")
    return str(value)


def _text(source: str, row: Mapping[str, Any], name: str) -> str | None:
    value = row.get(name)
    if value is None or (isinstance(value, str) and value):
        return value
    raise DataError(f"{source}: {name} must be text, got {shown(value)}; mend it or leave it out")


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, Mapping) else None
