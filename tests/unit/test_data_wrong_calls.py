"""Which tool calls are wrong, and what becomes of their turns."""

import json
import runpy
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from megatron_rl.config import DataError
from megatron_rl.data.conversation import Conversation
from megatron_rl.data.render import ChatRenderer, MaskConfig
from megatron_rl.data.wrong_calls import find_wrong_calls
from megatron_rl.rollout.tool import Tool, ToolBox

CHAT = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "chat_templates.py")))
user, assistant, result, call, tool = (getattr(CHAT, name) for name in ("user", "assistant", "result", "call", "tool"))
TOOLS = [tool("book", amount="number"), tool("look", place="string")]
Message = dict[str, Any]


def wrong(messages: list[Message], tools: list[Message] | None = None) -> dict[tuple[int, int], str]:
    found = find_wrong_calls(messages, TOOLS if tools is None else tools)
    return {(one.message, one.call): one.reason for one in found}


def with_id(one: Message, name: str) -> Message:
    return {**one, "id": name}


def test_an_unknown_tool_is_wrong_and_without_tools_none_is_unknown() -> None:
    messages = [user("q"), assistant("", None, [call("book", amount=1), call("buy", amount=1)])]
    assert wrong(messages) == {(1, 1): "unknown tool 'buy'; tools are book, look"}
    assert wrong(messages, []) == {}


def test_arguments_that_do_not_fit_the_schema_are_wrong() -> None:
    text, missing, extra = call("book", amount="14,40"), call("book"), call("look", place="x", y=1)
    reasons = wrong([user("q"), assistant("", None, [text, missing, extra, call("book", amount=14.4)])])
    assert list(reasons) == [(1, 0), (1, 1), (1, 2)]
    assert reasons[1, 0] == "arguments: amount: '14,40' is not of type 'number'"
    assert "'amount' is a required property" in reasons[1, 1] and "'y' was unexpected" in reasons[1, 2]


def test_calls_and_tools_may_stand_without_a_function_around_them() -> None:
    bare = [one["function"] for one in TOOLS]
    messages = [
        user("q"),
        assistant("", None, [call("book", amount="x")["function"], call("look", place="x")["function"]]),
    ]
    assert list(wrong(messages, bare)) == [(1, 0)]
    assert wrong([user("q"), assistant("", None, [call("free", x=1)])], [{"name": "free"}]) == {}


REFUSED = ToolBox([Tool("book", "", TOOLS[0]["function"]["parameters"], lambda _: "ok")])


@pytest.mark.parametrize(
    ("content", "more", "failed"),
    [
        ("ok", {"is_error": True}, True),
        ("ok", {"is_error": False}, False),
        ('{"error": "no such place"}', {}, True),
        ('{"error": null, "value": 1}', {}, False),
        ('{"error": ""}', {}, False),
        ('["error"]', {}, False),
        ('{"error"', {}, False),
        (REFUSED.run('<tool_call>{"name": "buy", "arguments": {}}</tool_call>')[0]["content"], {}, True),
        (REFUSED.run('<tool_call>{"name": "book", "arguments": {}}</tool_call>')[0]["content"], {}, True),
        (REFUSED.run("<tool_call>x</tool_call>")[0]["content"], {}, True),
        ("no error: all is well", {}, False),
        ("", {}, False),
    ],
)
def test_the_repeat_of_a_call_is_wrong_if_its_result_was_an_error(content: str, more: Message, failed: bool) -> None:
    again = assistant("", None, [call("look", place="x")])
    messages = [user("q"), again, result(content, **more), again, result("ok")]
    assert wrong(messages) == ({(3, 0): "exact repeat of a failed call"} if failed else {})


def test_only_the_exact_repeat_of_what_failed_last_is_wrong() -> None:
    def ask(place: str) -> Message:
        return assistant("", None, [call("look", place=place)])

    def answer(works: bool) -> Message:
        return result("ok", is_error=not works)

    messages = [
        user("q"),
        ask("x"),
        answer(False),
        ask("y"),
        answer(True),
        ask("x"),
        answer(True),
        ask("x"),
        answer(False),
    ]
    assert list(wrong(messages)) == [(5, 0)]
    assert list(wrong([*messages, ask("x")])) == [(5, 0), (9, 0)]
    reordered = [tool("f", a="number", b="number")], [call("f", a=1, b=2)], [call("f", b=2, a=1)]
    tools, first, second = reordered
    assert list(wrong([user("q"), assistant("", None, first), answer(False), assistant("", None, second)], tools)) == [
        (3, 0)
    ]


def test_two_equal_calls_of_one_turn_are_no_repeat_but_both_failed() -> None:
    twice = [call("look", place="x"), call("look", place="x")]
    messages = [user("q"), assistant("", None, twice), result("e", is_error=True), result("e", is_error=True)]
    assert wrong(messages) == {}
    assert list(wrong([*messages, assistant("", None, twice[:1])])) == [(4, 0)]


def test_results_belong_to_calls_by_id_or_else_by_order() -> None:
    calls = [with_id(call("look", place="x"), "1"), with_id(call("look", place="y"), "2")]
    swapped = [result("ok", tool_call_id="2"), result("e", tool_call_id="1", is_error=True)]
    again = [with_id(one, f"{one['id']}b") for one in calls]
    assert list(wrong([user("q"), assistant("", None, calls), *swapped, assistant("", None, again)])) == [(4, 0)]
    ordered = [result("ok"), result("e", is_error=True)]
    assert list(wrong([user("q"), assistant("", None, calls), *ordered, assistant("", None, again)])) == [(4, 1)]


def test_a_schema_that_is_none_and_one_that_is_not_whole_are_data_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[Any] = []
    monkeypatch.setattr("urllib.request.urlopen", lambda *asked, **_: fetched.append(asked))
    messages = [user("q"), assistant("", None, [call("f", x=1)])]
    broken = {"type": "function", "function": {"name": "f", "parameters": {"type": "nothing"}}}
    with pytest.raises(
        DataError, match=r"parameters of tools\[0\] must be a JSON schema, got one where type: .*; mend"
    ):
        wrong(messages, [broken])
    remote = {"name": "f", "parameters": {"properties": {"x": {"$ref": "http://localhost:1/schema.json"}}}}
    with pytest.raises(DataError, match=r"schema of tool 'f' must be complete, but it refers to something"):
        wrong(messages, [remote])
    assert not fetched, "a row of data must not make us ask a server"
    assert wrong([user("q"), assistant("a")], [broken]) == {}


@pytest.mark.parametrize(
    ("schema", "value", "found"),
    [
        ({"$schema": 5}, 1, r"parameters of tools\[0\] must be a JSON schema, got AttributeError"),
        ({"$schema": []}, 1, r"parameters of tools\[0\] must be a JSON schema, got TypeError"),
        ({"$ref": "#"}, 1, "arguments of tool 'f' must be something that its schema can judge, got RecursionError"),
        ({"$id": "http://[bad", "$ref": "x"}, 1, "can judge, got ValueError"),
        ({"properties": {"x": {"multipleOf": 0.5}}}, 10**400, "can judge, got OverflowError"),
    ],
)
def test_what_breaks_the_check_of_a_call_is_a_data_error(schema: dict[str, Any], value: int, found: str) -> None:
    """So that on_bad_row says what becomes of the row, and the row is named."""
    with pytest.raises(DataError, match=found):
        wrong([user("q"), assistant("", None, [call("f", x=value)])], [{"name": "f", "parameters": schema}])


def test_a_result_without_an_id_beside_one_with_an_id_belongs_to_no_call() -> None:
    calls = [with_id(call("book", amount=1), "1"), call("look", place="a")]
    messages = [
        *(user("q"), assistant("", None, calls)),
        *({**result("fine"), "tool_call_id": "1"}, result("error: no")),
        assistant("", None, [call("look", place="a")]),
    ]
    assert wrong(messages) == {}


MODES: dict[str, dict[str, str]] = {
    "mask_turn": {"reasoning": "", "answer": "", "wrong": "", "right": "", "end_of_turn": ""},
    "mask_call": {"reasoning": "t", "answer": "t", "wrong": "", "right": "t", "end_of_turn": "t"},
    "train": {"reasoning": "t", "answer": "t", "wrong": "t", "right": "t", "end_of_turn": "t"},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["qwen3", "glm45"])
def test_wrong_calls_are_kept_and_masked_as_told(
    name: str, mode: Literal["mask_turn", "mask_call", "train"], tmp_path: Path
) -> None:
    renderer = ChatRenderer(CHAT.make_tokenizer(name, tmp_path))
    calls = [call("book", amount=1), call("book", amount="1,00"), call("look", place="x")]
    messages = [
        user("q"),
        assistant("a", "r", calls),
        result("1"),
        result("error: x"),
        result("3"),
        assistant("b", "s"),
    ]
    rendered = renderer.render(Conversation("f:1", messages, TOOLS), MaskConfig(wrong_tool_calls=mode), parts=True)
    everything = renderer.render(Conversation("f:1", messages, TOOLS), MaskConfig(wrong_tool_calls="train"))
    assert rendered.token_ids.tolist() == everything.token_ids.tolist(), "the context keeps what is masked"
    first = [span for span in rendered.spans if span.kind != "context"][:6]
    roles = ["reasoning", "answer", "right", "wrong", "right", "end_of_turn"]
    assert [span.trained for span in first] == [bool(MODES[mode][role]) for role in roles]
    text = renderer.decode(rendered.token_ids[first[3].start : first[3].end].tolist())
    assert text.startswith("<tool_call>") and "1,00" in text and text.rstrip().endswith("</tool_call>")
    if mode != "train":
        assert first[3].reason == "wrong call: arguments: amount: '1,00' is not of type 'number'"
    if mode == "mask_turn":
        assert all(span.reason.endswith("is not of type 'number'") for span in first)
    later = [span for span in rendered.spans if span.start > first[-1].end and span.kind != "context"]
    assert [span.kind for span in later] == ["reasoning", "answer", "end_of_turn"] and all(
        span.trained for span in later
    )
    plain = renderer.render(Conversation("f:1", messages, TOOLS), MaskConfig(wrong_tool_calls=mode))
    assert plain.loss_mask.tolist() == rendered.loss_mask.tolist()
    assert all(a.end == b.start for a, b in pairwise(plain.spans))


def test_the_bakers_failing_variant_is_a_masked_turn(tiny: Path) -> None:
    from megatron_rl.data.render import load_tokenizer

    renderer = ChatRenderer(load_tokenizer(tiny / "model"))
    rows = [json.loads(line) for line in (tiny / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    strings = 0
    for row in rows:
        last = row["messages"][-1]["tool_calls"][0]["function"]["arguments"]["betrag"]
        rendered = renderer.render(Conversation("f:1", row["messages"], row["tools"]))
        assert rendered.loss_mask.any() == (not isinstance(last, str))
        strings += isinstance(last, str)
    assert 0 < strings < len(rows)
