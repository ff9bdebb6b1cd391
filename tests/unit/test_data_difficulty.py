"""Difficulty from a grader: every task asked for once, whatever the order, the concurrency or a stop in between."""

import asyncio
import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.config import DataError, RunError
from megatron_rl.data.conversation import Conversation
from megatron_rl.data.difficulty import (
    LEVELS,
    UNGRADED,
    GradedDifficulty,
    GraderConfig,
    grade,
    open_grades,
    parse_level,
    task_of,
)
from megatron_rl.data.endpoint import Completion

_HELPERS = runpy.run_path(str(Path(__file__).parents[1] / "scripted_endpoint.py"))
ScriptedEndpoint, chat_answer, MODEL = _HELPERS["ScriptedEndpoint"], _HELPERS["chat_answer"], _HELPERS["MODEL"]


def conversation(task: str, *more: str) -> Conversation:
    messages = [{"role": "user", "content": task}, {"role": "assistant", "content": "a"}]
    messages += [{"role": "user", "content": text} for text in more]
    return Conversation("rows.jsonl:1", messages, [])


def config(url: str, **options: Any) -> GraderConfig:
    endpoint = {"url": url, "model": MODEL, "concurrency": 3, "max_retries": 0, "timeout_s": 5}
    return GraderConfig.model_validate({"endpoint": endpoint, **options})


def graded(tmp_path: Path, grader: GraderConfig, tasks: Sequence[str]) -> tuple[list[str], Any]:
    """(level of each task, what run_all counted)."""
    rows = [conversation(task) for task in tasks]
    with open_grades(tmp_path / "grades.jsonl", grader) as journal:
        counts = asyncio.run(grade(iter(rows), grader, journal))
        return [GradedDifficulty(journal).level({}, row) for row in rows], counts


def by_length(body: dict[str, Any]) -> dict[str, Any]:
    """Short tasks are easy, long ones hard, and about weather it says nothing that counts."""
    question = body["messages"][-1]["content"]
    task = question.partition("<task>\n")[2].partition("\n</task>")[0]
    return chat_answer("who knows" if "weather" in task else "Easy." if len(task) < 10 else "**hard**")


TASKS = ["short", "weather", "a long and winding task", "short", "brief", "another long and winding task"]
GRADES = ["easy", UNGRADED, "hard", "easy", "easy", "hard"]


def test_each_task_is_asked_for_once_and_unparsable_answers_are_a_level(tmp_path: Path) -> None:
    with ScriptedEndpoint(by_length) as endpoint:
        levels, counts = graded(tmp_path, config(endpoint.url), TASKS)
        assert levels == GRADES
        assert (counts.done, counts.found) == (5, 1) and len(endpoint.bodies) == 5
        assert all(body["temperature"] == 0 for body in endpoint.bodies), "a grade is no matter of chance"
        again, counts = graded(tmp_path, config(endpoint.url), TASKS[::-1])
        assert again == GRADES[::-1]
        assert (counts.done, counts.found) == (0, 6) and len(endpoint.bodies) == 5, "nothing is asked twice"


def test_a_stopped_grading_goes_on_with_what_is_missing(tmp_path: Path) -> None:
    refused: list[str] = []

    def failing(body: dict[str, Any]) -> Any:
        from aiohttp import web

        if "winding" in str(body) and not refused:
            refused.append(str(body))
            return web.Response(status=500)
        return by_length(body)

    with ScriptedEndpoint(failing) as endpoint:
        with pytest.raises(RunError, match=r"1 of 6 failed.*run the same command again"):
            graded(tmp_path, config(endpoint.url), TASKS)
        asked = len(endpoint.bodies)
        levels, _ = graded(tmp_path, config(endpoint.url), TASKS)
        assert levels == GRADES and len(endpoint.bodies) == asked + 1


def test_grades_of_another_grader_are_not_mixed_in(tmp_path: Path) -> None:
    with ScriptedEndpoint(by_length) as endpoint:
        graded(tmp_path, config(endpoint.url), TASKS[:1])
        with pytest.raises(DataError, match="max_tokens"):
            graded(tmp_path, config(endpoint.url, max_tokens=7), TASKS[:1])
        with ScriptedEndpoint(by_length) as moved:
            assert graded(tmp_path, config(moved.url), TASKS)[0] == GRADES, "the server may move"


def test_a_grader_that_is_not_there_is_named_with_its_address(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"http://127.0.0.1:9/v1 .*start the server"):
        graded(tmp_path, config("http://127.0.0.1:9/v1"), TASKS)


@pytest.mark.parametrize(
    ("text", "finish_reason", "level"),
    [
        ("hard", "stop", "hard"),
        ("**Medium**.\n", "stop", "medium"),
        ("<think>easy, or is it medium?</think>\n\nhard", "stop", "hard"),
        ("I would say: easy", "stop", "easy"),
        ("hardly", "stop", None),
        ("easy or hard", "stop", None),
        ("", "stop", None),
        ("<think>this is hard", "stop", None),
        ("hard", "length", None),
    ],
)
def test_an_answer_names_exactly_one_level_or_none(text: str, finish_reason: str, level: str | None) -> None:
    assert parse_level(Completion(text, None, finish_reason=finish_reason)) == level
    assert level is None or level in LEVELS


def test_the_task_is_what_is_asked_before_the_first_answer() -> None:
    system = {"role": "system", "content": "rules"}
    row = conversation("one", "later")
    assert task_of(row) == "one"
    asked_twice = Conversation("", [system, {"role": "user", "content": "two"}, *row.messages], [])
    assert task_of(asked_twice) == "two\n\none"
    assert task_of(Conversation("", [system, row.messages[1]], [])) == "rules"
    assert task_of(Conversation("", [row.messages[1]], [])) == ""


def test_a_row_without_a_task_is_ungraded_and_nobody_is_asked(tmp_path: Path) -> None:
    with ScriptedEndpoint(by_length) as endpoint:
        assert graded(tmp_path, config(endpoint.url), ["  "])[0] == [UNGRADED]
        assert not endpoint.bodies


def test_a_long_task_is_shown_without_its_middle(tmp_path: Path) -> None:
    task = "A" * 300 + "M" * 1000 + "Z" * 300
    with ScriptedEndpoint(by_length) as endpoint:
        graded(tmp_path, config(endpoint.url, max_task_characters=400), [task])
        question = endpoint.bodies[0]["messages"][-1]["content"]
    assert f"<task>\n{'A' * 300}\n[...]\n{'Z' * 100}\n</task>" in question
