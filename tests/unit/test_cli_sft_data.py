"""The SFT data of a run file: bad input is refused in one line before anything starts, good input is counted."""

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.cli.main import app

INPUT = runpy.run_path(str(Path(__file__).parents[1] / "cli_input.py"))
sft, write_checkpoint = INPUT["sft"], INPUT["write_checkpoint"]
Report = Callable[..., str]
STREAM = {"kind": "stream", "open_bins": 2, "buffer": 3}


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str]) -> Report:
    """Runs sft --dry-run in this process and returns what it prints."""

    def run(*arguments: str) -> str:
        app(["sft", *arguments, "--dry-run"], standalone_mode=False)
        return capsys.readouterr().out

    return run


def row(answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": answer}]}


def file_of(path: Path, *rows: Any) -> str:
    path.write_text("".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in rows))
    return str(path)


def tokens_in(text: str) -> int:
    """Of the training data, as a report counts them."""
    return int(text.split(" conversations, ")[1].split(" tokens")[0].replace(",", ""))


def test_bad_data_is_refused_in_one_line(tiny: Path, tmp_path: Path, error_of: Callable[..., str]) -> None:
    good, empty = file_of(tmp_path / "good.jsonl", row("b")), file_of(tmp_path / "empty.jsonl")
    train = str(tiny / "train.jsonl")
    cases: dict[str, dict[str, Any]] = {
        "must have at least one conversation, got none": {"train": [empty]},
        "must be readable, got No such file": {"train": [str(tmp_path / "none.jsonl")]},
        "train.0.weight has no effect with one dataset": {"train": [{"path": good, "weight": 1}]},
        "train.1.weight must be greater than or equal to 0, got -1": {
            "train": [{"path": good, "weight": 1}, {"path": train, "weight": -1}]
        },
        "weights must not all be zero": {"train": [{"path": good, "weight": 0}, {"path": train, "weight": 0}]},
        "must draw at least one row of dataset good": {"train": [train, {"path": good, "epochs": 0.1}]},
        "packing.open_bins must be greater than or equal to 1, got 0": {"packing": {**STREAM, "open_bins": 0}},
        "packing.buffer must be greater than or equal to 1, got 0": {"packing": {**STREAM, "buffer": 0}},
        "unknown key data.packing.buffer": {"packing": {"kind": "step", "buffer": 4}},
        "data.samples_per_step has no effect with data.packing.kind stream": {
            "packing": STREAM,
            "samples_per_step": 3,
        },
        "data.check_rows must be greater than or equal to 1, got 0": {"check_rows": 0},
        "data.packing.kind must be 'step' or 'stream', got 'flow'": {"packing": {"kind": "flow"}},
        "must be 'error', 'truncate' or 'drop', got 'cut'": {"oversized": "cut"},
    }
    for words, data in cases.items():
        assert words in error_of("sft", sft(tiny, tmp_path, data={"train": [train], **data})), words


def test_a_conversation_longer_than_the_context_is_named_with_its_cures(
    tiny: Path, tmp_path: Path, error_of: Callable[..., str], report: Report
) -> None:
    path = file_of(tmp_path / "rows.jsonl", row("b"), row("b " * 300), '{"messages"')
    for packing in ({"kind": "step"}, STREAM):
        config = sft(tiny, tmp_path, data={"train": [path], "packing": packing, "on_bad_row": "skip"})
        error = error_of("sft", config)
        assert f"{path}:2: a conversation must have at most context_length = 256 tokens" in error
        assert "raise context_length, or set data.oversized to truncate or drop" in error
        assert "3 conversations" in report(config, "data.oversized=drop")
    text = report(config, "data.oversized=truncate")
    assert f"1 of them bad, the first: {path}:3: " in text and "1 of them truncated" in text


def test_a_stream_is_counted_in_tokens(tiny: Path, tmp_path: Path, report: Report) -> None:
    other = file_of(tmp_path / "other.jsonl", *[row("b " * 100)] * 4)
    train = [{"path": str(tiny / "train.jsonl"), "epochs": 2}, other]
    packing = {**STREAM, "microbatches_per_step": 3}
    config = sft(tiny, tmp_path, data={"train": train, "packing": packing, "microbatch_tokens": 512})
    assert "warning" not in report(config, "data.packing.open_bins=1", "data.packing.buffer=1")
    text = report(config, "run.processes=2", "trainer.steps=7")
    alone = report(sft(tiny, tmp_path, data={"train": [other]}))
    tokens = 2 * tokens_in(text) - tokens_in(alone)
    assert "12 conversations, " in text and "a pass draws 16 of train, 4 of other" in text
    assert "6 microbatches, at most 3,072 tokens" in text
    assert f"{tokens / 3072:,.1f} steps per pass; 7 steps are {7 * 3072 / tokens:.2f} passes" in text
    assert "each rank holds 2 open and 3 packed microbatches, at most 2,560 tokens" in text
    assert f"they hold {2 * 2560 / tokens:,.1f} passes of the data; lower data.packing.open_bins" in text


def test_rows_after_the_checked_ones_are_said_to_be_unchecked(tiny: Path, tmp_path: Path, report: Report) -> None:
    path = file_of(tmp_path / "rows.jsonl", row("b"), row("b"), "{")
    text = report(sft(tiny, tmp_path, data={"train": [path], "check_rows": 2}))
    assert "3 conversations, about " in text
    assert f"not checked: data: rows of {path} after the first 2, by data.check_rows" in text


def test_a_checkpoint_of_other_data_is_refused_before_anything_starts(
    tiny: Path, tmp_path: Path, error_of: Callable[..., str]
) -> None:
    extra = write_checkpoint(tmp_path / "run", tiny / "model", step=2) / "extra"
    extra.mkdir()
    (extra / "data").write_text(json.dumps({"epoch": 0, "position": 4, "seed": 0, "num_samples": 8}))
    assert "of an older version, which drew rows in another order" in error_of("sft", sft(tiny, tmp_path))
    (extra / "data").write_text(json.dumps({"identity": {"run.seed": 4}, "ranks": []}))
    assert "resume with the run.seed it started with, 4, got 0" in error_of("sft", sft(tiny, tmp_path))
    (extra / "data").write_text("{")
    assert "must be whole" in error_of("sft", sft(tiny, tmp_path))
