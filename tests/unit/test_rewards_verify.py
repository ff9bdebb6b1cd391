"""Answer checks: exact types, strict JSON, and nothing a model writes raises."""

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.rewards.verify import ToolCall, ToolCallError, check_arguments, numbers_equal, parse_tool_calls

SCHEMA = {
    "type": "object",
    "properties": {"betrag": {"type": "number"}, "anzahl": {"type": "integer"}, "posten": {"type": "array"}},
    "required": ["betrag"],
    "additionalProperties": False,
}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.parametrize(
    ("value", "equal"),
    [
        (16.2, True),
        (16.204, True),
        (16.206, False),
        (-16.2, False),
        (16, False),
        ("16.2", False),
        (True, False),
        (None, False),
        ([16.2], False),
        (math.nan, False),
        (math.inf, False),
        (10**400, False),
    ],
    ids=repr,
)
def test_numbers_are_compared_as_numbers(value: Any, equal: bool) -> None:
    assert numbers_equal(value, 16.2, tolerance=0.005) is equal


def test_a_bool_is_no_number_even_where_it_would_be_equal() -> None:
    assert not numbers_equal(True, 1.0, tolerance=0) and numbers_equal(1, 1.0, tolerance=0)


@pytest.mark.parametrize("tolerance", [-0.1, math.nan])
def test_a_tolerance_below_zero_is_refused(tolerance: float) -> None:
    with pytest.raises(ValueError, match=f"tolerance must not be negative, got {tolerance}"):
        numbers_equal(1.0, 1.0, tolerance=tolerance)


@pytest.mark.parametrize(
    ("arguments", "faults"),
    [
        ({"betrag": 16.2}, []),
        ({"betrag": 16, "anzahl": 3}, []),
        ({"betrag": "16.2"}, ["betrag: '16.2' is not of type 'number'"]),
        ({"betrag": True}, ["betrag: True is not of type 'number'"]),
        ({"betrag": 1.5, "anzahl": 1.5}, ["anzahl: 1.5 is not of type 'integer'"]),
        ({}, ["'betrag' is a required property"]),
        ({"betrag": 1, "tag": 2}, ["Additional properties are not allowed ('tag' was unexpected)"]),
        (
            {"betrag": "x", "anzahl": "y"},
            ["anzahl: 'y' is not of type 'integer'", "betrag: 'x' is not of type 'number'"],
        ),
    ],
)
def test_arguments_are_checked_with_exact_json_types(arguments: dict[str, Any], faults: list[str]) -> None:
    assert check_arguments(arguments, SCHEMA) == faults


def test_a_fault_names_its_place_inside_the_arguments() -> None:
    nested = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "string"}}}}
    assert check_arguments({"a": ["x", 2]}, nested) == ["a.1: 2 is not of type 'string'"]


def test_calls_are_found_in_order_between_any_text() -> None:
    text = 'Also:<tool_call>{"name":"f","arguments":{"x":1}}</tool_call> und\n<tool_call>\n'
    text += '{"arguments": {}, "name": "g", "id": 7}\n</tool_call> fertig'
    assert parse_tool_calls(text) == [ToolCall("f", {"x": 1}), ToolCall("g", {})]


def test_a_text_without_calls_has_none() -> None:
    assert parse_tool_calls('Das sind 16,20 Euro. {"name": "f", "arguments": {}} </tool_call>') == []


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        ('{"name":"f","arguments":{"x":14,40}}', "not valid JSON"),
        ("", "not valid JSON"),
        ('{"name":"f","arguments":{"x":NaN}}', "not valid JSON: NaN is no JSON number"),
        ('{"name":"f","arguments":{"x":-Infinity}}', "not valid JSON: -Infinity is no JSON number"),
        ('{"name":"f","arguments":{"x":1e999}}', "not valid JSON: 1e999 is too large a number"),
        ('{"name":"f","arguments":{"x":' + "9" * 5000 + "}}", "not valid JSON"),
        ('{"name":"f","arguments":{"x":1,"x":2}}', "not valid JSON: a key may occur once"),
        ('{"name":"f","arguments":{}} {"name":"g"}', "not valid JSON: Extra data"),
        ("[" * 200_000, "not valid JSON"),
        ("14.4", "a call must be a JSON object"),
        ('[{"name":"f","arguments":{}}]', "a call must be a JSON object"),
        ('{"arguments":{}}', "name must be the name of a tool"),
        ('{"name":"","arguments":{}}', "name must be the name of a tool"),
        ('{"name":["f"],"arguments":{}}', "name must be the name of a tool"),
        ('{"name":"f"}', "arguments must be a JSON object"),
        ('{"name":"f","arguments":"{}"}', "arguments must be a JSON object"),
    ],
    ids=lambda text: text[:40],
)
def test_a_call_that_does_not_parse_says_why_and_stops_no_other(block: str, reason: str) -> None:
    first, second = parse_tool_calls(
        f'<tool_call>{block}</tool_call><tool_call>{{"name":"g","arguments":{{}}}}</tool_call>'
    )
    assert isinstance(first, ToolCallError) and first.text == block and first.reason.startswith(reason)
    assert second == ToolCall("g", {})


def test_a_call_that_was_cut_off_is_an_error_though_its_json_is_whole() -> None:
    whole = '{"name":"f","arguments":{}}'
    assert parse_tool_calls(f"<tool_call>{whole}") == [ToolCallError(whole, "the closing </tool_call> is missing")]


@given(st.text(min_size=1), st.dictionaries(st.text(), JSON, max_size=3))
def test_every_call_survives_writing_and_parsing(name: str, arguments: dict[str, Any]) -> None:
    written = json.dumps({"name": name, "arguments": arguments}).replace("</tool_call>", "")
    if "<tool_call>" not in written:
        assert parse_tool_calls(f"<tool_call>{written}</tool_call>") == [ToolCall(name, arguments)]


@given(
    st.lists(st.sampled_from(["<tool_call>", "</tool_call>", "{", "}", '"name"', ":", '"f"', "x", "\n"])).map("".join)
)
def test_no_text_raises(text: str) -> None:
    for call in parse_tool_calls(text):
        assert isinstance(call, ToolCall | ToolCallError)
