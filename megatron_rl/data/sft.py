"""SFT rows: JSON lines of {"messages": [...], "tools": [...]} in Hugging Face chat form, checked one by one."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from megatron_rl.config import ConfigModel, DataError
from megatron_rl.data.render import ChatRenderer
from megatron_rl.records import Sample

_ROLES = ("system", "user", "assistant", "tool")


class SftDataConfig(ConfigModel):
    """Conversations and how they are batched."""

    train: list[str] = Field(min_length=1)
    """JSONL files of conversations, one object with messages and optional tools per line."""
    heldout: list[str] = []
    """JSONL files whose loss is measured and never trained on."""
    samples_per_step: int = Field(ge=1, default=16)
    """Conversations of one optimizer step, over all ranks."""
    microbatch_tokens: int = Field(ge=1, default=4096)
    """Most tokens of one packed microbatch on one rank."""


@dataclass(frozen=True)
class Conversation:
    """One checked row."""

    source: str
    """path:line"""
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]


def load_conversations(path: Path) -> Iterator[Conversation]:
    """Rows of a file, blank lines left out, one at a time. DataError names file and line of the first that is wrong."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise DataError(
            f"data file {path} must be readable, got {error.strerror}; give the path of a JSONL file"
        ) from None
    found = False
    with file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            found = True
            try:
                yield _conversation(f"{path}:{number}", line)
            except _RowError as error:
                raise DataError(f"{path}:{number}: {error}") from None
    if not found:
        raise DataError(f"data file {path} must have at least one conversation, got none; write one per line")


def sft_samples(path: Path, renderer: ChatRenderer, *, context_length: int) -> list[Sample]:
    """One sample per row, its id path:line. DataError names the row that cannot be rendered or exceeds the context."""
    return [_sample(row, renderer, context_length) for row in load_conversations(path)]


def _sample(row: Conversation, renderer: ChatRenderer, context_length: int) -> Sample:
    try:
        token_ids, loss_mask = renderer.conversation(row.messages, row.tools)
    except DataError as error:
        raise DataError(f"{row.source}: {error}") from error
    if len(token_ids) > context_length:
        raise DataError(
            f"{row.source}: a conversation must have at most context_length = {context_length} tokens, "
            f"got {len(token_ids)}; shorten it or raise context_length"
        )
    return Sample(sample_id=row.source, token_ids=token_ids, loss_mask=loss_mask)


class _RowError(Exception):
    """Rule, value and cure; the caller knows file and line."""


def _conversation(source: str, line: bytes) -> Conversation:
    try:
        row = json.loads(line.decode("utf-8-sig").rstrip())
    except UnicodeDecodeError as error:
        raise _RowError(f"a row must be UTF-8 text, got byte {line[error.start]:#04x}; convert the file") from None
    except (ValueError, RecursionError) as error:
        reason = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise _RowError(f"a row must be one JSON object, got malformed JSON: {reason}; mend the line") from None
    if not isinstance(row, dict):
        raise _RowError(f"a row must be a JSON object, got {_shown(row)}; write an object with messages")
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        got = _shown(messages) if "messages" in row else f"the keys {_shown(list(row))}"
        raise _RowError(f"a row must have messages, a list with at least one, got {got}; add them")
    for index, message in enumerate(messages):
        _check_message(f"messages[{index}]", message)
    if not any(message["role"] == "assistant" for message in messages):
        raise _RowError("messages must have an assistant turn, got none; add one or remove the row")
    return Conversation(source, messages, _tools(row.get("tools")))


def _tools(tools: Any) -> list[dict[str, Any]]:
    if tools is None:
        return []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise _RowError(f"tools must be a list of function schemas, got {_shown(tools)}; mend it or leave it out")
    return tools


def _check_message(name: str, message: Any) -> None:
    if not isinstance(message, dict):
        raise _RowError(f"{name} must be an object with role and content, got {_shown(message)}; mend it")
    role, content, calls = message.get("role"), message.get("content"), message.get("tool_calls")
    if role not in _ROLES:
        raise _RowError(f"{name}.role must be one of {', '.join(_ROLES)}, got {_shown(role)}; mend it")
    if calls is not None and role != "assistant":
        raise _RowError(f"{name}.tool_calls belong to assistant messages, got them on role {role}; move them")
    if calls is not None and not isinstance(calls, list):
        raise _RowError(f"{name}.tool_calls must be a list, got {_shown(calls)}; mend it")
    for index, call in enumerate(calls or []):
        _check_call(f"{name}.tool_calls[{index}]", call)
    if not isinstance(content, str) and (content is not None or not calls):
        raise _RowError(f"{name}.content must be text, got {_shown(content)}; write one string")


def _check_call(name: str, call: Any) -> None:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _RowError(f"{name} must have a function with a name and arguments, got {_shown(call)}; mend it")


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False).encode(errors="replace").decode()
    return text if len(text) <= 80 else text[:77] + "..."
