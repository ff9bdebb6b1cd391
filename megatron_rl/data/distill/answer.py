"""From a completion to a turn: reasoning, answer and tool calls, or why it is none."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rl.data.distill.config import ThinkingConfig
from megatron_rl.data.endpoint_answer import Completion

CUT_OFF, UNCLOSED, EMPTY, MALFORMED, REFUSED = "cut off", "reasoning not closed", "empty", "malformed call", "refused"
"""Why an answer is no turn: its length, no closing mark, nothing behind it, a call that is no JSON, the server."""
SPECIAL = "special token in the text"

CALL_MARKS = ("<tool_call>", "</tool_call>")
_TEXT_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_CODE_FENCE = re.compile(r"\A\s*```(?:json)?\s*\n(.*?)\n?```\s*\Z", re.DOTALL)


@dataclass(frozen=True)
class Answer:
    """What the teacher wrote behind the opening of its reasoning."""

    reasoning: str
    content: str
    tool_calls: list[dict[str, Any]]
    """With arguments as objects."""
    problem: str = ""
    """Why it cannot be used; empty if it can."""


def split_answer(completion: Completion, thinking: ThinkingConfig, opening: str, phrase: str) -> Answer:
    """The parts of an answer, split by the server's reasoning parser or, without one, by the closing mark.

    opening and phrase: what the reasoning was opened with; a server may repeat both. phrase is not in the result.
    """
    reasoning, content, closed = _parts(completion, thinking, opening + phrase)
    calls, content = _calls(completion.tool_calls, content)
    problem = _problem(completion.finish_reason, closed, bool(content.strip()) or calls is None or bool(calls))
    if not problem and calls is None:
        problem = MALFORMED
    return Answer(reasoning, content.strip(), calls or [], problem)


def without_reasoning(completion: Completion, close: str) -> tuple[str, str]:
    """(text behind any reasoning, which `close` ends; problem) of a model that is asked for plain text."""
    text = completion.text.rpartition(close)[2].strip()
    return text, _problem(completion.finish_reason, True, bool(text))


def parsed_call(call: Mapping[str, Any]) -> dict[str, Any] | None:
    """A call whose arguments are an object; None if it has no name or its arguments are none."""
    function = call.get("function", call)
    if not isinstance(function, Mapping):
        return None
    name, arguments = function.get("name"), function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            return None
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    called = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"id": call["id"], **called} if call.get("id") else called


def canonical_calls(calls: Sequence[Mapping[str, Any]]) -> list[str] | None:
    """Name and canonical JSON arguments of each call, sorted: equal if and only if the same calls are made.

    Canonical: keys sorted, no whitespace, 16.0 is 16. None if a call is malformed.
    """
    parsed = [parsed_call(call) for call in calls]
    if any(call is None for call in parsed):
        return None
    return sorted(canonical([call["function"]["name"], call["function"]["arguments"]]) for call in parsed if call)


def canonical(value: Any) -> str:
    """JSON text that equal values share."""
    return json.dumps(_plain(value), ensure_ascii=False, sort_keys=True, separators=(",", ":"))


def calls_in_text(text: str) -> list[dict[str, Any]] | None:
    """Calls of an answer that is to be a JSON list of them, in a code fence or not; None if it is something else."""
    fenced = _CODE_FENCE.match(text)
    try:
        value = json.loads(fenced[1] if fenced else text)
    except (ValueError, RecursionError):
        return None
    calls = [value] if isinstance(value, dict) else value
    return calls if isinstance(calls, list) and all(isinstance(call, dict) for call in calls) else None


def _parts(completion: Completion, thinking: ThinkingConfig, opened: str) -> tuple[str, str, bool]:
    """(reasoning, content, whether the reasoning was closed)."""
    text = completion.text
    if completion.reasoning is not None and thinking.close not in text:
        reasoning = completion.reasoning.removeprefix(opened)
        return reasoning, text, bool(text.strip()) or bool(completion.tool_calls)
    text = text.removeprefix(opened)
    if not opened:
        text = text.lstrip().removeprefix(thinking.open.strip())
    reasoning, mark, content = text.partition(thinking.close)
    return reasoning, content, bool(mark)


def _calls(calls: Sequence[Mapping[str, Any]], content: str) -> tuple[list[dict[str, Any]] | None, str]:
    """(calls or None if one is malformed, content without them): those of the server's parser, or those in the text."""
    if not calls:
        texts = _TEXT_CALL.findall(content)
        calls = [call for text in texts for call in calls_in_text(text) or [{}]]
        content = _TEXT_CALL.sub("", content)
    parsed = [parsed_call(call) for call in calls]
    whole = [call for call in parsed if call is not None]
    return (whole if len(whole) == len(parsed) else None), content


def _problem(finish_reason: str, closed: bool, has_content: bool) -> str:
    if finish_reason == "length":
        return CUT_OFF
    if finish_reason == "content_filter":
        return REFUSED
    if not closed:
        return UNCLOSED
    return "" if has_content else EMPTY


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value
