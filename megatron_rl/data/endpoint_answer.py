"""What goes over the wire of an OpenAI-compatible API, as plain JSON: messages out, completions in."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]


@dataclass(frozen=True)
class Completion:
    """One answer."""

    text: str
    """What the model wrote, without what a server's parsers took out of it."""
    reasoning: str | None = None
    """What the server's reasoning parser took for reasoning; None without such a parser."""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    """As the server's tool parser found them: {"id", "type": "function", "function": {"name", "arguments": JSON text}};
    the text may be malformed."""
    finish_reason: str = "stop"
    """stop, length (the answer is cut off), tool_calls, or a word of the server's own."""
    num_tokens: int = 0
    """Sampled tokens; 0 if the server does not tell."""


def api_message(message: Message) -> Message:
    """A copy in the API's form: tool-call arguments are JSON text, reasoning has both names that servers know."""
    sent = {key: value for key, value in message.items() if key != "tool_calls"}
    if calls := message.get("tool_calls"):
        sent["tool_calls"] = [_api_call(call, index) for index, call in enumerate(calls)]
    if reasoning := message.get("reasoning_content"):
        sent["reasoning"] = reasoning
    return sent


def _api_call(call: Mapping[str, Any], index: int) -> dict[str, Any]:
    function = call.get("function", call)
    arguments = function.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    called = {"name": function["name"], "arguments": text}
    return {"id": str(call.get("id") or f"call_{index}"), "type": "function", "function": called}


def check_choices(answer: Any) -> None:
    """ValueError if an answer is not one of /chat/completions or /completions."""
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise ValueError("an answer must have choices")
    if not isinstance(choices[0].get("text"), str) and not isinstance(choices[0].get("message"), dict):
        raise ValueError("a choice must have a message or a text")


def completion_of(answer: Mapping[str, Any]) -> Completion:
    """The first choice of a checked answer."""
    choice = answer["choices"][0]
    message = choice.get("message") or {"content": choice.get("text")}
    reasoning = message.get("reasoning_content")
    if reasoning is None:
        reasoning = message.get("reasoning")  # vLLM's newer name for it
    calls = message.get("tool_calls")
    return Completion(
        text=_text(message.get("content")),
        reasoning=None if reasoning is None else _text(reasoning),
        tool_calls=[_call(call) for call in calls] if isinstance(calls, list) else [],
        finish_reason=str(choice.get("finish_reason")),
        num_tokens=_num_tokens(answer.get("usage")),
    )


def _call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    function = function if isinstance(function, dict) else {}
    called = {"name": _text(function.get("name")), "arguments": _text(function.get("arguments"))}
    return {"id": _text(call.get("id") if isinstance(call, dict) else None), "type": "function", "function": called}


def _text(value: Any) -> str:
    """A text without halves of surrogate pairs, which a cut-off answer may end in and no file can hold."""
    text = "" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text.encode(errors="replace").decode()


def _num_tokens(usage: Any) -> int:
    count = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return count if isinstance(count, int) else 0
