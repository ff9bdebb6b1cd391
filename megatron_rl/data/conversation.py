"""One row of conversation data, in Hugging Face chat form: what it may hold, and what is wrong with one that does not.

A row has `messages` and may have `tools` and `effort`; other columns are no concern of training and are left alone.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rl.config import DataError

EFFORTS = ("none", "low", "medium", "high")
"""Values of the column `effort`."""

_ROLES = ("system", "user", "assistant", "tool")
_MESSAGE_TEXTS = {"reasoning_content": ("assistant",), "tool_call_id": ("tool",), "name": _ROLES}
"""Optional text of a message -> the roles that may have it."""


@dataclass(frozen=True)
class Conversation:
    """One checked row. Keys of messages and calls that are null in the row are missing here, `content` aside."""

    source: str
    """path:line of a JSONL file, path[row] of a Parquet file or a `datasets` folder: what errors name."""
    messages: list[dict[str, Any]]
    """role and content; reasoning_content and tool_calls on the assistant's; content is None only beside tool_calls."""
    tools: list[dict[str, Any]]
    effort: str | None = None
    """One of EFFORTS; None in a row without a label."""
    dataset: str = ""
    """Name of the dataset the row came from."""


def conversation_of(source: str, row: Mapping[str, Any], *, dataset: str = "") -> Conversation:
    """The checked conversation of a row, which is not changed. DataError with source, rule, value and cure.

    Parquet and `datasets` give all structs of a column the same keys and fill them up with nulls, so a null in a
    message, in a call or anywhere in an arguments object counts as a missing key. `tools`, a single tool and arguments
    may also be JSON text; the text of arguments stays as it is, nulls included.
    """
    try:
        messages = _messages(row)
        return Conversation(source, messages, _tools(row.get("tools")), _effort(row.get("effort")), dataset)
    except _RowError as error:
        raise DataError(f"{source}: {error}") from None


class _RowError(Exception):
    """Rule, value and cure; the caller knows the source."""


def _messages(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        got = shown(messages) if "messages" in row else f"the keys {shown(list(row))}"
        raise _RowError(f"a row must have messages, a list with at least one, got {got}; add them")
    checked = [_message(f"messages[{index}]", message) for index, message in enumerate(messages)]
    if not any(message["role"] == "assistant" for message in checked):
        raise _RowError("messages must have an assistant turn, got none; add one or remove the row")
    return checked


def _message(name: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise _RowError(f"{name} must be an object with role and content, got {shown(message)}; mend it")
    role, content, calls = message.get("role"), message.get("content"), message.get("tool_calls")
    if role not in _ROLES:
        raise _RowError(f"{name}.role must be one of {', '.join(_ROLES)}, got {shown(role)}; mend it")
    if calls and role != "assistant":
        raise _RowError(f"{name}.tool_calls belong to assistant messages, got them on role {role}; move them")
    if calls is not None and not isinstance(calls, list):
        raise _RowError(f"{name}.tool_calls must be a list, got {shown(calls)}; mend it")
    if not isinstance(content, str) and (content is not None or not calls):
        raise _RowError(f"{name}.content must be text, got {shown(content)}; write one string")
    for key, roles in _MESSAGE_TEXTS.items():
        _check_text(name, message, key=key, roles=roles)
    kept = {key: value for key, value in message.items() if value is not None and key != "tool_calls"}
    kept["content"] = content
    if calls:
        kept["tool_calls"] = [_call(f"{name}.tool_calls[{index}]", call) for index, call in enumerate(calls)]
    return kept


def _check_text(name: str, message: Mapping[str, Any], *, key: str, roles: Sequence[str]) -> None:
    value = message.get(key)
    if value is None:
        return
    if message["role"] not in roles:
        raise _RowError(f"{name}.{key} belongs to {roles[0]} messages, got it on role {message['role']}; remove it")
    if not isinstance(value, str):
        raise _RowError(f"{name}.{key} must be text, got {shown(value)}; write one string or leave it out")


def _call(name: str, call: Any) -> dict[str, Any]:
    """A copy of {"function": {"name", "arguments"}} or of the function alone."""
    function = call.get("function") or call if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise _RowError(f"{name} must have a function with a name and arguments, got {shown(call)}; mend it")
    kept = _without_nulls(function)
    if not isinstance(kept.get("arguments", {}), dict | str):
        raise _RowError(
            f"arguments of {name} must be an object or its JSON text, got {shown(kept['arguments'])}; mend them"
        )
    if function is call:
        return kept
    return {key: kept if key == "function" else value for key, value in call.items() if value is not None}


def _without_nulls(value: Any) -> Any:
    """A copy without the keys whose value is null, at any depth."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _tools(tools: Any) -> list[dict[str, Any]]:
    parsed = _parsed(tools)
    if parsed is None:
        return []
    checked: list[Any] = [_parsed(tool) for tool in parsed] if isinstance(parsed, list) else [None]
    for tool in checked:
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _RowError(
                f"tools must be a list of function schemas, each with a name, got {shown(tools)}; "
                "mend it or leave it out"
            )
    return checked


def _parsed(value: Any) -> Any:
    """What JSON text says; anything else, and text that is not JSON, as it is."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def _effort(effort: Any) -> str | None:
    if effort is None or effort in EFFORTS:
        return effort
    raise _RowError(f"effort must be one of {', '.join(EFFORTS)}, got {shown(effort)}; mend it, or label the file anew")


def shown(value: Any) -> str:
    """A value of a row as JSON for an error message, cut to 80 characters."""
    text = json.dumps(value, ensure_ascii=False, default=str).encode(errors="replace").decode()
    return text if len(text) <= 80 else text[:77] + "..."
