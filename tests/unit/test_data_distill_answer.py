"""From what servers send to turns, and when two models make the same call."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.data.distill.answer import (
    CUT_OFF,
    EMPTY,
    MALFORMED,
    REFUSED,
    UNCLOSED,
    calls_in_text,
    canonical_calls,
    split_answer,
    without_reasoning,
)
from megatron_rl.data.distill.config import ThinkingConfig
from megatron_rl.data.endpoint import Completion

THINKING = ThinkingConfig()
BOOK = {"type": "function", "function": {"name": "buche", "arguments": {"betrag": 16.2}}}


def api_call(arguments: str, name: str = "buche") -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize(
    ("completion", "reasoning", "content"),
    [
        pytest.param(Completion(" drei mal zwölf.\n</think>\n\n36."), " drei mal zwölf.\n", "36.", id="no parser"),
        pytest.param(Completion("36.", " drei mal zwölf."), " drei mal zwölf.", "36.", id="parser"),
        pytest.param(Completion(" drei.</think>36.", ""), " drei.", "36.", id="parser that saw no opening"),
        pytest.param(Completion("36.", ""), "", "36.", id="parser, closed at once"),
        pytest.param(Completion("<think>\nAlso, drei.</think>36."), " drei.", "36.", id="no parser, opening repeated"),
        pytest.param(Completion("36.", "<think>\nAlso, drei."), " drei.", "36.", id="parser, opening repeated"),
        pytest.param(Completion(" a</think>b</think>c"), " a", "b</think>c", id="the first mark closes"),
    ],
)
def test_an_answer_is_split_alike_with_and_without_the_servers_parser(
    completion: Completion, reasoning: str, content: str
) -> None:
    answer = split_answer(completion, THINKING, "<think>\n", "Also,")
    assert (answer.reasoning, answer.content, answer.problem) == (reasoning, content, "")


@pytest.mark.parametrize(
    ("completion", "problem"),
    [
        (Completion(" drei</think>36", finish_reason="length"), CUT_OFF),
        (Completion(" drei mal zwölf", finish_reason="length"), CUT_OFF),
        (Completion(" drei mal zwölf"), UNCLOSED),
        (Completion("", " drei mal zwölf"), UNCLOSED),
        (Completion(" drei</think>\n "), EMPTY),
        (Completion("", "", finish_reason="content_filter"), REFUSED),
        (Completion("", " drei", [api_call('{"betrag": 16.')]), MALFORMED),
        (Completion("", " drei", [api_call("[1]")]), MALFORMED),
        (Completion("", " drei", [api_call("{}", name="")]), MALFORMED),
        (Completion(' drei</think><tool_call>{"name": "buche", "argum</tool_call>'), MALFORMED),
    ],
)
def test_an_answer_that_is_no_turn_says_why(completion: Completion, problem: str) -> None:
    assert split_answer(completion, THINKING, "<think>\n", "Also,").problem == problem


def test_calls_are_found_by_the_servers_parser_or_in_the_text() -> None:
    by_server = split_answer(
        Completion("Ich buche.", " gut.", [api_call('{"betrag": 16.2}')]), THINKING, "<think>\n", "Also,"
    )
    assert by_server.tool_calls == [{"id": "c1", **BOOK}] and by_server.content == "Ich buche."
    text = ' gut.</think>Ich buche.\n<tool_call>\n{"name": "buche", "arguments": {"betrag": 16.2}}\n</tool_call>'
    by_text = split_answer(Completion(text), THINKING, "<think>\n", "Also,")
    assert by_text.tool_calls == [BOOK] and by_text.content == "Ich buche." and not by_text.problem
    no_arguments = split_answer(Completion("", " gut.", [api_call("")]), THINKING, "<think>\n", "Also,")
    assert no_arguments.tool_calls[0]["function"]["arguments"] == {}


def test_the_baseline_without_an_opening_is_split_too() -> None:
    for text in ("<think>\ndrei</think>36", "\ndrei</think>36"):
        answer = split_answer(Completion(text), THINKING, "", "")
        assert (answer.reasoning.strip(), answer.content, answer.problem) == ("drei", "36", "")


def test_plain_text_is_what_stands_behind_a_reasoning() -> None:
    assert without_reasoning(Completion("hm</think> Weil drei. "), "</think>") == ("Weil drei.", "")
    assert without_reasoning(Completion("Weil drei.", "hm"), "</think>") == ("Weil drei.", "")
    assert without_reasoning(Completion("Weil", finish_reason="length"), "</think>")[1] == CUT_OFF
    assert without_reasoning(Completion(" \n"), "</think>")[1] == EMPTY


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(st.text(max_size=4), JSON, max_size=3)


def same(left: Any, right: Any) -> bool:
    """Equality of JSON values, the independent way: numbers by value, booleans are no numbers."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right and isinstance(left, int | float) == isinstance(right, int | float)


@settings(max_examples=40)
@given(ARGUMENTS, ARGUMENTS, st.randoms())
def test_calls_are_the_same_if_and_only_if_name_and_arguments_are(left: Any, right: Any, random: Any) -> None:
    def calls(*arguments: Any) -> list[str] | None:
        return canonical_calls([{"function": {"name": "f", "arguments": value}} for value in arguments])

    assert (calls(left) == calls(right)) == same(left, right)
    shuffled = list(left.items())
    random.shuffle(shuffled)
    assert calls(left) == calls(dict(shuffled)) == calls(json.dumps(left)) == calls(json.dumps(left, indent=2))
    assert calls(left, right) == calls(right, left), "calls of one turn are made side by side"
    assert calls(left) != calls(left, left)
    assert canonical_calls([{"name": "g", "arguments": left}]) != calls(left)


def test_numbers_are_compared_by_value_and_booleans_are_none() -> None:
    def call(value: Any) -> list[str] | None:
        return canonical_calls([{"name": "f", "arguments": {"x": value}}])

    assert call(16.0) == call(16) and call(16.2) != call("16.2") and call(True) != call(1)
    assert canonical_calls([{"name": "f", "arguments": '{"x": 1'}]) is None


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('[{"name": "f", "arguments": {}}]', [{"name": "f", "arguments": {}}]),
        ('{"name": "f"}', [{"name": "f"}]),
        ('```json\n[{"name": "f"}]\n```', [{"name": "f"}]),
        ("[]", []),
        ('[{"name": "f", "argum', None),
        ("I would call f.", None),
        ("[1]", None),
        ("3", None),
    ],
)
def test_a_list_of_calls_is_read_from_text(text: str, calls: list[Any] | None) -> None:
    assert calls_in_text(text) == calls
