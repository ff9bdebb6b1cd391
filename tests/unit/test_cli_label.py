"""The verbs label and effort-template as a person types them: what they write, and one line for what does not fit."""

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from megatron_rl.cli.main import app
from megatron_rl.data.effort_template import extend_template, uses_effort
from megatron_rl.data.rows import open_rows

TESTS = Path(__file__).parents[1]
ENDPOINT = runpy.run_path(str(TESTS / "scripted_endpoint.py"))
CHAT = runpy.run_path(str(TESTS / "chat_templates.py"))


def run(*arguments: str | Path) -> str:
    """Standard output of a command that succeeds."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def efforts(folder: Path) -> dict[str, str]:
    """Label by id over all files of a labelled folder, which the trainer's reader opens."""
    rows = open_rows(folder)
    return {row["id"]: row["effort"] for row in (rows.row(i) for i in range(len(rows)))}


def test_the_tiny_reasoning_gets_every_label_and_a_report(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "labelled"
    table = run("label", tiny / "model", tiny / "reasoning.jsonl", "--difficulty-column", "difficulty", "--out", out)
    assert "easy" in table and "medium" in table and "all" in table
    report = json.loads((tmp_path / "labelled.report.json").read_text())
    assert {group["origin"] for group in report["groups"]} == {"group"}
    num_traces = report["rows"] - report["labels"]["none"]
    for effort, share in (("low", 0.3), ("medium", 0.4), ("high", 0.3)):
        assert abs(report["labels"][effort] / num_traces - share) < 0.15, "few different lengths, so only about"
    labels = efforts(out)
    assert len(labels) == report["rows"] == 512
    assert {effort: list(labels.values()).count(effort) for effort in report["labels"]} == report["labels"]


def grader_file(folder: Path, url: str) -> Path:
    path = folder / "grader.yaml"
    path.write_text(yaml.safe_dump({"endpoint": {"url": url, "model": ENDPOINT["MODEL"], "max_retries": 0}}))
    return path


def by_person(body: dict[str, Any]) -> dict[str, Any]:
    """Grades by who bakes, and does not know every baker."""
    task = body["messages"][-1]["content"]
    return ENDPOINT["chat_answer"]("easy" if "Frau" in task else "hard" if "Tante" in task else "no idea")


def test_graded_labels_are_the_same_under_any_order_cut_and_restart(tiny: Path, tmp_path: Path) -> None:
    lines = (tiny / "reasoning.jsonl").read_text().splitlines(keepends=True)[:60]
    (tmp_path / "whole.jsonl").write_text("".join(lines))
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "a.jsonl").write_text("".join(lines[::-3]))
    (tmp_path / "cut" / "b.jsonl").write_text("".join(line for line in lines if line not in lines[::-3]))
    model = tiny / "model"
    with ENDPOINT["ScriptedEndpoint"](by_person) as endpoint:
        grader = grader_file(tmp_path, endpoint.url)
        first = run("label", model, tmp_path / "whole.jsonl", "--grader", grader, "--out", tmp_path / "one")
        num_asked = len(endpoint.bodies)
        run("label", model, tmp_path / "cut", "--grader", grader, "--out", tmp_path / "two")
        (tmp_path / "one.grades.jsonl").rename(tmp_path / "three.grades.jsonl")
        run("label", model, f"c={tmp_path / 'cut'}", "--grader", grader, "--out", tmp_path / "three")
        assert len(endpoint.bodies) == 2 * num_asked, "the third run finds every grade in its journal"
    assert efforts(tmp_path / "one") == efforts(tmp_path / "two") == efforts(tmp_path / "three")
    assert "ungraded" in first and "have no level of difficulty" in first
    levels = {group["difficulty"] for group in json.loads((tmp_path / "one.report.json").read_text())["groups"]}
    assert levels == {"easy", "hard", "ungraded"}


def test_reasoning_inside_content_is_pointed_out(tiny: Path, tmp_path: Path) -> None:
    answer = {"role": "assistant", "content": "<think>hm</think>yes"}
    row = {"messages": [{"role": "user", "content": "a"}, answer]}
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    assert "inside content" in run("label", tiny / "model", tmp_path / "a.jsonl", "--out", tmp_path / "out")


def test_what_does_not_fit_is_one_clear_error(tiny: Path, tmp_path: Path, error_of: Callable[..., str]) -> None:
    model, data, out = str(tiny / "model"), str(tiny / "reasoning.jsonl"), str(tmp_path / "out")
    error = error_of("label", model, data, "--out", out, "--difficulty-column", "dificulty")
    assert "reasoning.jsonl:1: a row must have the difficulty column 'dificulty'" in error and "did you mean" in error
    error = error_of("label", model, str(tmp_path / "no.jsonl"), "--out", out)
    assert "no.jsonl must be readable" in error
    error = error_of("label", str(tmp_path / "no"), data, "--out", out)
    assert "MODEL must be a Hugging Face folder" in error
    grader = grader_file(tmp_path, "http://127.0.0.1:9/v1")
    error = error_of("label", model, data, "--out", out, "--difficulty-column", "difficulty", "--grader", str(grader))
    assert "exclude each other" in error
    error = error_of("label", model, data, "--out", out, "--grader", str(grader))
    assert "http://127.0.0.1:9/v1" in error and "start the server" in error
    grader.write_text("endpoint: {url: http://a/v1, modle: b}\n")
    error = error_of("label", model, data, "--out", out, "--grader", str(grader))
    assert "modle" in error and "did you mean model?" in error
    (tmp_path / "broken.jsonl").write_text('{"messages": [\n')
    assert "broken.jsonl:1" in error_of("label", model, str(tmp_path / "broken.jsonl"), "--out", out)
    assert not Path(out).exists() and not list(tmp_path.glob(".out*")), "nothing is left behind"
    Path(out).mkdir()
    assert "must not exist yet" in error_of("label", model, data, "--out", out)


@pytest.fixture
def qwen(tmp_path: Path) -> Path:
    CHAT["make_tokenizer"]("qwen3", tmp_path / "qwen")
    return tmp_path / "qwen"


def test_an_extended_template_is_printed_or_written(qwen: Path, tmp_path: Path) -> None:
    expected = extend_template(CHAT["template"]("qwen3"))
    assert run("effort-template", qwen) == expected + "\n"
    assert run("effort-template", qwen, "--out", tmp_path / "new" / "chat.jinja") == f"{tmp_path}/new/chat.jinja\n"
    assert (tmp_path / "new" / "chat.jinja").read_text() == expected and uses_effort(expected)


def test_what_cannot_be_extended_is_one_clear_error(
    tiny: Path, qwen: Path, tmp_path: Path, error_of: Callable[..., str]
) -> None:
    assert "must not read reasoning_effort yet" in error_of("effort-template", str(tiny / "model"))
    assert "MODEL must be a Hugging Face folder" in error_of("effort-template", str(tmp_path / "no"))
    assert "must not exist yet" in error_of("effort-template", str(qwen), "--out", str(qwen / "chat_template.jinja"))
    (qwen / "chat_template.jinja").write_text("{{ messages[-1].content }}")
    error = error_of("effort-template", str(qwen))
    assert str(qwen) in error and "comes 0 times" in error
