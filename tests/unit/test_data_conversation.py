"""Rows become checked conversations: each kind of wrong row by its message, and nulls that mean nothing are gone."""

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.config import DataError
from megatron_rl.data.conversation import EFFORTS, conversation_of

USER = {"role": "user", "content": "x"}
ANSWER = {"role": "assistant", "content": "y"}


def row(*messages: Any, **more: Any) -> dict[str, Any]:
    return {"messages": list(messages), **more}


def calling(*calls: Any) -> dict[str, Any]:
    return row(USER, {"role": "assistant", "content": None, "tool_calls": list(calls)})


BAD_ROWS = {
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
        row(USER, {"role": "assistant", "content": [{"type": "text", "text": "y"}]}),
        r"messages\[1\].content must be text, got \[\{",
    ),
    "content that JSON cannot show": (
        row({"role": "user", "content": b"x"}, ANSWER),
        r"content must be text, got \"b'x",
    ),
    "no content": (row({"role": "user"}, ANSWER), r"messages\[0\].content must be text, got null"),
    "an answer of nothing": (row(USER, {"role": "assistant", "content": None}), r"messages\[1\].content must be text"),
    "an answer of no calls": (
        row(USER, {"role": "assistant", "tool_calls": []}),
        r"messages\[1\].content must be text",
    ),
    "no assistant turn": (row(USER), "must have an assistant turn, got none"),
    "reasoning of a user": (
        row({**USER, "reasoning_content": "r"}, ANSWER),
        "belongs to assistant messages, got it on",
    ),
    "reasoning in parts": (
        row(USER, {**ANSWER, "reasoning_content": ["r"]}),
        r"reasoning_content must be text, got \[",
    ),
    "a call id of a user": (
        row({**USER, "tool_call_id": "1"}, ANSWER),
        "tool_call_id belongs to tool messages, got it",
    ),
    "a name that is a number": (row({**USER, "name": 3}, ANSWER), r"messages\[0\].name must be text, got 3"),
    "tools as an object": (row(USER, ANSWER, tools={"name": "f"}), 'tools must be a list .*got {"name": "f"}'),
    "tools of text": (row(USER, ANSWER, tools=["f"]), r'tools must be a list .*got \["f"\]'),
    "tools of broken JSON": (row(USER, ANSWER, tools='[{"name": '), r"tools must be a list .*got \"\[\{"),
    "a tool without name": (row(USER, ANSWER, tools=[{"type": "function", "function": {}}]), "each with a name, got"),
    "calls of a user": (row({**USER, "tool_calls": [{"name": "f"}]}, ANSWER), "belong to assistant messages, got them"),
    "calls of another kind": (row(USER, {**ANSWER, "tool_calls": "f"}), r"tool_calls must be a list, got \"f\""),
    "a call without name": (
        calling({"function": {}}),
        r"messages\[1\].tool_calls\[0\] must have a function with a name",
    ),
    "a call that is text": (
        calling({"name": "f"}, "f"),
        r"tool_calls\[1\] must have a function with a name .*got \"f\"",
    ),
    "arguments in a list": (calling({"name": "f", "arguments": [1]}), r"must be an object or its JSON text, got \[1\]"),
    "unknown effort": (row(USER, ANSWER, effort="max"), 'effort must be one of none, low, medium, high, got "max"'),
    "effort of another kind": (row(USER, ANSWER, effort=[3]), r"effort must be one of .*got \[3\]"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_bad_row_gives_source_rule_value_and_cure_in_one_line(name: str) -> None:
    bad, message = BAD_ROWS[name]
    with pytest.raises(DataError, match=message) as caught:
        conversation_of("rows.parquet[7]", bad)
    text = str(caught.value)
    assert text.startswith("rows.parquet[7]: ") and "; " in text and "\n" not in text and len(text) < 300


def test_a_row_is_taken_as_it_is_with_its_extra_keys() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"default": None}}}}}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": [None, {"b": 1}]}}}
    messages = [
        {"role": "system", "content": ""},
        {"role": "user", "content": "x", "name": "ann"},
        {"role": "assistant", "content": None, "reasoning_content": "r", "tool_calls": [call], "weight": 2},
        {"role": "tool", "content": "z", "tool_call_id": "1", "name": "f", "is_error": True},
        {"role": "assistant", "content": "y", "reasoning_content": ""},
    ]
    given_row = row(*messages, tools=[tool], effort="low", id="a", difficulty=3)
    before = copy.deepcopy(given_row)
    conversation = conversation_of("s", given_row, dataset="d")
    assert (conversation.source, conversation.dataset, conversation.effort) == ("s", "d", "low")
    assert (conversation.messages, conversation.tools) == (messages, [tool])
    assert given_row == before


@pytest.mark.parametrize("effort", [None, *EFFORTS])
def test_every_effort_and_none_is_taken(effort: str | None) -> None:
    assert conversation_of("s", row(USER, ANSWER, effort=effort)).effort == effort
    assert conversation_of("s", row(USER, ANSWER)).effort is None


def test_tools_and_arguments_may_be_json_text_whose_nulls_are_kept() -> None:
    tool = {"name": "f", "parameters": {"properties": {"a": {"default": None}}}}
    for tools in (json.dumps([tool]), [json.dumps(tool)]):
        assert conversation_of("s", row(USER, ANSWER, tools=tools)).tools == [tool]
    text = '{"a": null}'
    (kept,) = conversation_of("s", calling({"name": "f", "arguments": text})).messages[1]["tool_calls"]
    assert kept == {"name": "f", "arguments": text}


plain_values = st.recursive(
    st.sampled_from([True, 0, -3, 1.5, "", "ü"]),
    lambda below: st.lists(below, max_size=2) | st.dictionaries(st.sampled_from(["", "a", "b"]), below, max_size=2),
    max_leaves=6,
)


def with_nulls(value: Any, names: list[str]) -> Any:
    """The value with null under each name that an object of it lacks, as struct unification writes it."""
    if isinstance(value, dict):
        return {**{name: None for name in names}, **{key: with_nulls(item, names) for key, item in value.items()}}
    return [with_nulls(item, names) for item in value] if isinstance(value, list) else value


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(st.sampled_from(["", "a", "b"]), plain_values, max_size=3), st.lists(st.sampled_from("pqr")))
def test_nulls_that_unification_writes_are_as_if_they_were_not_there(
    arguments: dict[str, Any], names: list[str]
) -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": arguments}}
    plain = row(USER, {"role": "assistant", "content": None, "tool_calls": [call]}, ANSWER)
    unified = with_nulls(plain, ["reasoning_content", "tool_calls", "tool_call_id", "function", "arguments", *names])
    assert conversation_of("s", unified).messages == conversation_of("s", plain).messages == plain["messages"]


@settings(max_examples=40, deadline=None)
@given(plain_values)
def test_checking_a_checked_conversation_changes_nothing(value: Any) -> None:
    messy = row(
        {**USER, "tool_calls": []},
        {**ANSWER, "reasoning_content": None, "extra": value},
        {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"a": value, "b": None}}]},
        tools=json.dumps([{"name": "f"}]),
    )
    once = conversation_of("s", messy)
    again = conversation_of("s", {"messages": once.messages, "tools": once.tools, "effort": once.effort})
    assert again == once
