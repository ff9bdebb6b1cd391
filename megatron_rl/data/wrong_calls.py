"""Tool calls that no one should learn: unknown tools, arguments that do not fit, exact repeats of a call that failed.

A call failed if it is wrong itself or its result says so: `is_error` on the tool message, a JSON object with an `error`
that is not empty, or text that begins as our own tools' refusals do.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jsonschema import Draft202012Validator, SchemaError
from jsonschema.protocols import Validator
from jsonschema.validators import validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable

from megatron_rl.config import DataError

Message = dict[str, Any]

REFUSAL = "error: "
"""How the tool messages of rollout/tool.py begin when a call was refused."""


@dataclass(frozen=True)
class WrongCall:
    """One call of one message, and what is wrong with it."""

    message: int
    call: int
    reason: str


def find_wrong_calls(messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[WrongCall]:
    """The wrong calls of a conversation, in order; arguments must be objects. DataError if a tool's schema is none.

    Without tools none is unknown. A call that fails and later succeeds has not failed any more.
    """
    if not any(message.get("tool_calls") for message in messages):
        return []
    schemas = _schemas(tools)
    failed: set[str] = set()
    wrong = []
    for index, message in enumerate(messages):
        calls = [call.get("function", call) for call in message.get("tool_calls") or []]
        keys = [json.dumps([call["name"], call["arguments"]], sort_keys=True) for call in calls]
        reasons = [_fault(call, schemas) for call in calls]
        repeats = ["exact repeat of a failed call" if key in failed else "" for key in keys]
        for key, reason, result in zip(keys, reasons, _results(messages, index), strict=True):
            if reason or (result is not None and _failed(result)):
                failed.add(key)
            elif result is not None:
                failed.discard(key)
        found = [reason or repeat for reason, repeat in zip(reasons, repeats, strict=True)]
        wrong += [WrongCall(index, call, reason) for call, reason in enumerate(found) if reason]
    return wrong


def _schemas(tools: Sequence[dict[str, Any]]) -> dict[str, Validator]:
    schemas = {}
    for index, tool in enumerate(tools):
        function = tool.get("function", tool)
        parameters = function.get("parameters") or {}
        try:
            schemas[function["name"]] = _validator(json.dumps(parameters))
        except SchemaError as error:
            raise DataError(
                f"parameters of tools[{index}] must be a JSON schema, got one where {_line(error)}; mend it"
            ) from error
        except Exception as error:  # such as a $schema that is no text
            raise DataError(
                f"parameters of tools[{index}] must be a JSON schema, got {type(error).__name__}: {error}; mend it"
            ) from error
    return schemas


@lru_cache(maxsize=1024)
def _validator(schema: str) -> Validator:
    """Of a schema as JSON text, by the draft it names; nothing it refers to is fetched."""
    parsed = json.loads(schema)
    chosen = validator_for(parsed, default=Draft202012Validator)
    chosen.check_schema(parsed)
    return chosen(parsed, registry=Registry())


def _fault(call: Mapping[str, Any], schemas: Mapping[str, Validator]) -> str:
    """What is wrong with a call by itself, or nothing."""
    if not schemas:
        return ""
    if call["name"] not in schemas:
        return f"unknown tool {call['name']!r:.80}; tools are {', '.join(schemas):.200}"
    try:
        faults = list(schemas[call["name"]].iter_errors(call["arguments"]))
    except Unresolvable as error:
        raise DataError(
            f"the schema of tool {call['name']!r} must be complete, but it refers to something that it does not hold: "
            f"{error}; write that into the schema"
        ) from error
    except Exception as error:  # a schema that refers to itself, a number that no float holds, a $id that is no URI
        raise DataError(
            f"arguments of tool {call['name']!r} must be something that its schema can judge, got "
            f"{type(error).__name__}: {error!s:.80}; mend the schema or the arguments"
        ) from error
    faults.sort(key=lambda fault: [str(part) for part in fault.path])
    return f"arguments: {_line(faults[0])}" if faults else ""


def _line(fault: Any) -> str:
    place = ".".join(str(part) for part in fault.path)
    text = f"{place}: {fault.message}" if place else fault.message
    return text if len(text) <= 200 else text[:197] + "..."


def _results(messages: Sequence[Message], index: int) -> Iterator[Message | None]:
    """The tool message of each call of a message: by tool_call_id where it has one, else by order."""
    calls = messages[index].get("tool_calls") or []
    answers = []
    for message in messages[index + 1 :]:
        if message["role"] != "tool":
            break
        answers.append(message)
    by_id = {answer["tool_call_id"]: answer for answer in answers if answer.get("tool_call_id")}
    for number, call in enumerate(calls):
        if call.get("id") in by_id:
            yield by_id[call["id"]]
        else:
            yield answers[number] if number < len(answers) and not by_id else None


def _failed(result: Message) -> bool:
    if result.get("is_error") is True:
        return True
    content = (result.get("content") or "").strip()
    if content.startswith(REFUSAL):
        return True
    if not content.startswith("{"):
        return False
    try:
        answer = json.loads(content)
    except (ValueError, RecursionError):
        return False
    return bool(answer.get("error"))
