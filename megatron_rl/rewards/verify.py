"""What environments check answers with. Pure: text a model wrote in, a verdict out; nothing the model writes raises."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError

_BLOCK = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    """A call that parses; whether the tool exists and the arguments fit is another question."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class ToolCallError:
    """A call that does not parse."""

    text: str
    """What stood between the tags."""
    reason: str
    """What is wrong with it, for the model and for people to read."""


def numbers_equal(value: Any, expected: float, *, tolerance: float) -> bool:
    """Whether value is a number within tolerance (absolute, inclusive) of expected.

    A bool is no number, nor is a text that spells one; NaN and infinity equal nothing. ValueError: tolerance negative.
    """
    if not tolerance >= 0:
        raise ValueError(f"tolerance must not be negative, got {tolerance}; 0 asks for the exact number")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return abs(value - expected) <= tolerance
    except OverflowError:  # an int beyond the floats
        return False


def check_arguments(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> list[str]:
    """What keeps arguments from fitting a JSON schema, one line per fault, in order of place; empty if they fit.

    Draft 2020-12 and its exact types: a text that spells a number is no number, nor is a bool.
    """
    faults = sorted(Draft202012Validator(schema).iter_errors(arguments), key=lambda fault: [str(p) for p in fault.path])
    return [_line(fault) for fault in faults]


def parse_tool_calls(text: str) -> list[ToolCall | ToolCallError]:
    """The `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` blocks of a text, in order. (Hermes, Qwen)

    As in those models' own parsers a block ends at the first closing tag, and the last one also at the end of the
    text; here the latter is an error, since a cut call must not run. JSON is strict: no NaN, no infinity, no key twice.
    """
    return [_parse_block(block[1], closed=bool(block[2])) for block in _BLOCK.finditer(text)]


def _parse_block(text: str, *, closed: bool) -> ToolCall | ToolCallError:
    if not closed:
        return ToolCallError(text, "the closing </tool_call> is missing")
    try:
        call = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        return ToolCallError(text, f"not valid JSON: {error}")
    if not isinstance(call, dict):
        return ToolCallError(text, "a call must be a JSON object with name and arguments")
    name, arguments = call.get("name"), call.get("arguments")
    if not isinstance(name, str) or not name:
        return ToolCallError(text, "name must be the name of a tool")
    if not isinstance(arguments, dict):
        return ToolCallError(text, "arguments must be a JSON object")
    return ToolCall(name, arguments)


def _line(fault: ValidationError) -> str:
    place = ".".join(str(part) for part in fault.path)
    return f"{place}: {fault.message}" if place else fault.message


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON number")


def _finite(digits: str) -> float:
    if (value := float(digits)) in (float("inf"), float("-inf")):
        raise ValueError(f"{digits} is too large a number")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = dict(pairs)
    if len(keys) < len(pairs):
        raise ValueError(f"a key may occur once, got {[key for key, _ in pairs]}")
    return keys
