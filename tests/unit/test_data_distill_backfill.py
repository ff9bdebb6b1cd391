"""Reasoning backfill against two scripted models: who sees what, what is kept, what is reported, and resuming."""

import json
import os
import re
import runpy
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from megatron_rl.cli.distill import load_distill, run_distill
from megatron_rl.config import RunError, RunStop
from megatron_rl.data.distill.backfill import bare_turns, quotes_a_call

SCRIPTED = runpy.run_path(str(Path(__file__).parents[1] / "scripted_endpoint.py"))
ScriptedEndpoint, chat_answer = SCRIPTED["ScriptedEndpoint"], SCRIPTED["chat_answer"]
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("buche", "suche")
]
GERMAN = "Der Betrag für {} steht in der Aufgabe, und ich soll ihn buchen, also rufe ich das passende Werkzeug auf."
ENGLISH = "The amount for {} is given in the task, and I am asked to enter it, so I call the tool that does just that."


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"function": {"name": name, "arguments": arguments}}


def conversation(number: int, *calls: dict[str, Any], **columns: Any) -> dict[str, Any]:
    """A task, a turn that calls tools, their answer, and the turn that ends it."""
    messages = [
        {"role": "user", "content": f"Aufgabe {number}"},
        {"role": "assistant", "content": None, "tool_calls": list(calls)},
        {"role": "tool", "content": f"Ergebnis {number}"},
        {"role": "assistant", "content": "Fertig."},
    ]
    return {"id": f"r{number}", "messages": messages, "tools": TOOLS, **columns}


class Models:
    """Both models behind one endpoint, told apart by what they are told."""

    def __init__(self, writes: Callable[[int], Any], calls: Callable[[int], Any]) -> None:
        self.writes, self.calls = writes, calls
        self.to_writer: list[dict[str, Any]] = []
        self.to_checker: list[dict[str, Any]] = []

    def __call__(self, body: dict[str, Any]) -> Any:
        is_checker = body["model"] == "checker"
        (self.to_checker if is_checker else self.to_writer).append(body)
        asked = body["messages"][-1]["content"]
        if is_checker:
            return self.calls(int(re.findall(r"für (\d+)", asked)[0]))
        return self.writes(int(re.findall(r"Aufgabe (\d+)", asked)[0]))


def config(folder: Path, url: str, rows: list[dict[str, Any]], **changes: Any) -> Path:
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = {"url": url, "max_retries": 0, "timeout_s": 5}
    tree = {
        "kind": "backfill",
        "input": str(folder / "in.jsonl"),
        "output": str(folder / "out.jsonl"),
        "writer": {**model, "model": "writer"},
        "checker": {**model, "model": "checker"},
        "language": {"others": ["de", "en"]},
        **changes,
    }
    path = folder / "backfill.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def served(models: Models) -> Any:
    return ScriptedEndpoint(models, models=["writer", "checker"])


def jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def go(path: Path, *overrides: str) -> None:
    run_distill(load_distill(path, list(overrides)))


def as_text(*calls: dict[str, Any]) -> Any:
    return chat_answer(json.dumps([one["function"] for one in calls]), tokens=3)


def test_a_reasoning_is_kept_only_where_it_leads_the_second_model_to_the_same_call(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    writes = {
        2: chat_answer(ENGLISH.format(2)),
        3: chat_answer(GERMAN.format(3), finish_reason="length"),
        4: chat_answer(GERMAN.format(4) + ' {"betrag": 4.0}'),
        5: chat_answer(f"hm, mal sehen</think>\n{GERMAN.format(5)}"),
        6: chat_answer("", reasoning="hm"),
    }
    calls = {
        0: as_text(call("buche", betrag=16, waehrung="EUR")),
        1: as_text(call("buche", betrag="16")),
        5: as_text(call("suche", wort="b"), call("suche", wort="a")),
        7: chat_answer('[{"name": "buche", "argume', finish_reason="length"),
        8: chat_answer("Ich würde buchen."),
        9: as_text(),
    }
    models = Models(lambda n: writes.get(n, chat_answer(GERMAN.format(n), tokens=20)), calls.__getitem__)
    rows = [
        conversation(0, call("buche", waehrung="EUR", betrag=16.0), effort="low", difficulty="hard"),
        conversation(1, call("buche", betrag=16)),
        *(conversation(number, call("buche", betrag=number * 1.0)) for number in (2, 3, 4)),
        conversation(5, call("suche", wort="a"), call("suche", wort="b")),
        *(conversation(number, call("buche", betrag=number * 1.0)) for number in (6, 7, 8, 9)),
        conversation(10, call("buche", betrag=1), tools=None),
        conversation(11, {"function": {"name": "buche", "arguments": '{"betrag'}}),
        {"messages": [{"role": "user", "content": "Aufgabe 12"}, {"role": "assistant", "content": "ohne Werkzeug"}]},
    ]
    with served(models) as server:
        path = config(tmp_path, server.url, rows)
        go(path)
    go(path)  # the server is gone: all is known
    kept = jsonl(tmp_path / "out.jsonl")
    assert [row.get("id") for row in kept][:-1] == [f"r{i}" for i in range(12)], "no row is lost"
    filled = {row["id"]: row["messages"][1].get("reasoning_content") for row in kept}
    assert {name for name, text in filled.items() if text} == {"r0", "r5"}
    assert filled["r0"] == GERMAN.format(0) and filled["r5"] == GERMAN.format(5)
    assert kept[0]["backfilled"] == [1] and kept[1]["backfilled"] == []
    assert kept[0]["difficulty"] == "hard" and "effort" not in kept[0], "a label of effort speaks of another reasoning"
    for row, source in zip(kept, rows, strict=True):
        for message in row["messages"]:
            message.pop("reasoning_content", None)
        assert row["messages"] == source["messages"]
    dropped = {row["id"]: row for row in jsonl(tmp_path / "out.dropped.jsonl")}
    assert {name: row["reason"] for name, row in dropped.items()} == {
        "r1": "leads to another call",
        "r2": "not in its language",
        "r3": "cut off",
        "r4": "quotes the call",
        "r6": "empty",
        "r7": "cut off",
        "r8": "malformed call",
        "r9": "leads to another call",
        "r10": "row without tools",
        "r11": "the row's own call is malformed",
    }
    assert dropped["r1"]["derived"] == ['["buche",{"betrag":"16"}]'] and dropped["r1"]["message"] == 1
    total = json.loads((tmp_path / "out.report.json").read_text())["total"]
    assert (total["rows"], total["turns"], total["written"]) == (13, 12, 10)
    assert (total["checked"], total["agreed"], total["kept"], total["agreed_share"]) == (6, 2, 2, 2 / 6)
    assert (total["judged"], total["in_language"]) == (8, 7)
    printed = capsys.readouterr().out
    assert "33.3%" in printed and "dropped 2: leads to another call" in printed


@pytest.mark.parametrize("answers", ["json", "tool_calls"])
def test_the_writer_sees_what_came_before_and_the_call_and_the_checker_the_reasoning_alone(
    tmp_path: Path, answers: str
) -> None:
    def calls(number: int) -> Any:
        if answers == "json":
            return as_text(call("buche", betrag=3))
        function = {"name": "buche", "arguments": '{"betrag": 3.0}'}
        return chat_answer(None, tool_calls=[{"id": "x", "function": function}], finish_reason="tool_calls")

    models = Models(lambda number: chat_answer(GERMAN.format(number)), calls)
    with served(models) as server:
        go(config(tmp_path, server.url, [conversation(3, call("buche", betrag=3))], checker_answers=answers))
    (to_writer,), (to_checker,) = models.to_writer, models.to_checker
    seen = "\n".join(message["content"] for message in to_writer["messages"])
    assert "Aufgabe 3" in seen and '[{"name": "buche", "arguments": {"betrag": 3}}]' in seen and '"suche"' in seen
    assert "Ergebnis 3" not in seen and "Fertig" not in seen, "nothing that came later"
    assert to_checker["messages"][-1] == {"role": "user", "content": GERMAN.format(3)}
    everything = json.dumps(to_checker, ensure_ascii=False)
    assert "Aufgabe 3" not in everything and "Ergebnis" not in everything and '"betrag": 3' not in everything
    assert ("tools" in to_checker) == (answers == "tool_calls")
    assert to_checker.get("tools", TOOLS) == TOOLS and ('"suche"' in to_checker["messages"][0]["content"]) == (
        answers == "json"
    )
    assert jsonl(tmp_path / "out.jsonl")[0]["backfilled"] == [1]


def test_only_calls_without_reasoning_are_filled_each_by_itself() -> None:
    turn = {"role": "assistant", "content": "", "tool_calls": [call("buche")]}
    messages = [
        {"role": "user", "content": "x"},
        {**turn, "reasoning_content": "weil"},
        turn,
        {"role": "assistant", "content": "y"},
        {**turn, "reasoning_content": " \n"},
    ]
    assert bare_turns(messages) == [2, 4]


def test_a_reasoning_that_quotes_the_arguments_is_seen_however_they_are_written() -> None:
    calls = [call("buche", betrag=16.0, grund="drei Dutzend")]
    for quote in (
        '{"betrag": 16.0, "grund": "drei Dutzend"}',
        '{"grund":"drei Dutzend","betrag":16}',
        '{\n  "betrag": 16,\n  "grund": "drei Dutzend"\n}',
    ):
        assert quotes_a_call(f"Also {{{quote} buchen.", calls)
    assert not quotes_a_call("Ich buche 16 für drei Dutzend.", calls)
    assert not quotes_a_call("Ich rufe {} auf.", [call("liste")])


def test_what_the_writer_wrote_is_not_asked_for_again_when_the_checker_failed(tmp_path: Path) -> None:
    is_down = True

    def calls(number: int) -> Any:
        return web.Response(status=500) if is_down and number == 1 else as_text(call("buche", betrag=1))

    models = Models(lambda number: chat_answer(GERMAN.format(number)), calls)
    with served(models) as server:
        path = config(tmp_path, server.url, [conversation(number, call("buche", betrag=1)) for number in range(4)])
        with pytest.raises(RunError, match="1 of 4 failed for good, at last: checker"):
            go(path)
        assert [row["backfilled"] for row in jsonl(tmp_path / "out.jsonl")] == [[1], [], [1], [1]]
        is_down = False
        models.to_writer.clear()
        models.to_checker.clear()
        go(path)
        assert not models.to_writer and len(models.to_checker) == 1
        assert [row["backfilled"] for row in jsonl(tmp_path / "out.jsonl")] == [[1]] * 4


def test_a_lower_threshold_later_asks_only_for_the_checks_it_lets_in(tmp_path: Path) -> None:
    models = Models(
        lambda number: chat_answer((ENGLISH if number else GERMAN).format(number) + f" Also für {number} buchen."),
        lambda number: as_text(call("buche", betrag=1)),
    )
    with served(models) as server:
        path = config(tmp_path, server.url, [conversation(number, call("buche", betrag=1)) for number in range(2)])
        go(path)
        assert (len(models.to_writer), len(models.to_checker)) == (2, 1)
        go(path, "language.min_share=0")
        assert (len(models.to_writer), len(models.to_checker)) == (2, 2)
    assert [row["backfilled"] for row in jsonl(tmp_path / "out.jsonl")] == [[1], [1]]
    go(path)
    assert [row["backfilled"] for row in jsonl(tmp_path / "out.jsonl")] == [[1], []], "nothing is asked, all is known"


def test_ctrl_c_says_where_the_answers_are_and_the_next_run_goes_on(tmp_path: Path) -> None:
    asked = 0

    def calls(number: int) -> Any:
        nonlocal asked
        asked += 1
        if asked == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return as_text(call("buche", betrag=1))

    models = Models(lambda number: chat_answer(GERMAN.format(number)), calls)
    with served(models) as server:
        rows = [conversation(number, call("buche", betrag=1)) for number in range(12)]
        path = config(tmp_path, server.url, rows)
        with pytest.raises(RunStop, match=r"stopped; answers are in .*out\.journal, the same command goes on"):
            go(path, "writer.concurrency=1", "checker.concurrency=1")
        assert not (tmp_path / "out.jsonl").exists()
        go(path)
    assert len(jsonl(tmp_path / "out.jsonl")) == 12
    assert len(models.to_writer) + len(models.to_checker) <= 2 * 12 + 2
