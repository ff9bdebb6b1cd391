"""metrics.jsonl and rollouts.jsonl: what is written is read, kill -9 costs only the record being written."""

import json
import math
import random
import runpy
from pathlib import Path

import pytest

from megatron_rl.config.errors import DataError
from megatron_rl.telemetry.rollouts import RolloutLog, TokenRecord, read_rollouts
from megatron_rl.telemetry.sinks import (
    MetricsWriter,
    read_metrics,
    read_status,
    truncate_after,
    write_status,
)
from megatron_rl.telemetry.values import Last, Max, Mean, Rate

rollout_records = runpy.run_path(str(Path(__file__).parents[1] / "synthetic_run.py"))["rollout_records"]


def write_steps(run_dir: Path, steps: range, phase: str = "rl") -> None:
    writer = MetricsWriter(run_dir, tensorboard=False)
    for step in steps:
        writer.write(step, {"x": Last(step)}, phase=phase)


def steps_of(run_dir: Path, phase: str = "rl") -> list[int]:
    return [record["step"] for record in read_metrics(run_dir) if record["phase"] == phase]


def test_a_record_holds_every_metric_and_a_rate_its_interval(tmp_path: Path) -> None:
    MetricsWriter(tmp_path, tensorboard=False).write(
        3, {"a": Mean(6, 4), "b": Max(2), "nothing": Mean(0, 0), "inf": math.inf, "p": Rate(8, 10)}, phase="rl"
    )
    (record,) = read_metrics(tmp_path)
    low, high = Rate(8, 10).interval()
    assert record.pop("time") > 1e9
    assert record == {
        "phase": "rl",
        "step": 3,
        "a": 1.5,
        "b": 2.0,
        "nothing": None,
        "inf": None,
        "p": 0.8,
        "p/low": low,
        "p/high": high,
        "p/n": 10,
    }


def test_lines_are_strict_json(tmp_path: Path) -> None:
    MetricsWriter(tmp_path, tensorboard=False).write(0, {"nan": math.nan, "inf": -math.inf}, phase="sft")

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    json.loads((tmp_path / "metrics.jsonl").read_text(encoding="utf-8"), parse_constant=refuse)


def test_a_torn_last_line_is_no_record_and_does_not_spoil_the_next(tmp_path: Path) -> None:
    write_steps(tmp_path, range(1, 4))
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes()
    last = whole.splitlines(keepends=True)[-1]
    for cut in range(1, len(last)):
        path.write_bytes(whole[:-cut])
        assert steps_of(tmp_path) == [1, 2]
    write_steps(tmp_path, range(3, 4))
    assert steps_of(tmp_path) == [1, 2, 3]


def test_a_torn_line_longer_than_a_block_is_cut_off_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for start in ('{"step": 1, "phase": "rl"}\n', ""):
        path.write_text(start + '{"step": 2' + " " * 200_000, encoding="utf-8")
        MetricsWriter(tmp_path, tensorboard=False)
        assert path.read_text(encoding="utf-8") == start


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "phase": "rl"}\n{"step": \n', encoding="utf-8")
    with pytest.raises(DataError, match=r"metrics\.jsonl:2: "):
        read_metrics(tmp_path)


def test_resume_drops_exactly_what_will_be_redone(tmp_path: Path) -> None:
    write_steps(tmp_path, range(1, 9), phase="sft")
    writer = MetricsWriter(tmp_path, tensorboard=False)
    log = RolloutLog(tmp_path)
    for step in range(9):
        writer.write(step, {"x": Last(step)}, phase="rl")
        log.write(step, rollout_records(step, 2, skill=0.5, noise=random.Random(0)))
    truncate_after(tmp_path, 5, phase="rl")
    assert steps_of(tmp_path) == [0, 1, 2, 3, 4, 5]
    assert sorted({record.step for record in read_rollouts(tmp_path)}) == [0, 1, 2, 3, 4, 5]
    assert steps_of(tmp_path, "sft") == list(range(1, 9))
    writer.write(6, {"x": Last(6)}, phase="rl")
    assert steps_of(tmp_path) == [0, 1, 2, 3, 4, 5, 6], "a writer opened before goes on in the rewritten file"
    truncate_after(tmp_path, 0, phase="rl")
    assert steps_of(tmp_path) == [] and not list(read_rollouts(tmp_path))
    assert steps_of(tmp_path, "sft") == list(range(1, 9))


def test_truncating_a_folder_without_metrics_is_harmless(tmp_path: Path) -> None:
    truncate_after(tmp_path, 5, phase="rl")
    assert list(tmp_path.iterdir()) == []


def test_metrics_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, tensorboard=False)
    with pytest.raises(ValueError, match="cannot be called 'step'"):
        writer.write(1, {"step": Last(1)}, phase="rl")
    with pytest.raises(ValueError, match="'x' must be a telemetry value or a number, got str"):
        writer.write(1, {"x": "1"}, phase="rl")  # pyright: ignore[reportArgumentType]
    assert read_metrics(tmp_path) == []


def test_tensorboard_shows_the_same_numbers(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writer = MetricsWriter(tmp_path)
    for step in (1, 2):
        writer.write(step, {"reward/mean": Mean(step, 4), "p": Rate(step, 4)}, phase="rl")
    writer.close()
    board = EventAccumulator(str(tmp_path / "tensorboard" / "rl"))
    board.Reload()
    for name in ("reward/mean", "p", "p/low", "p/high", "p/n"):
        shown = [(event.step, event.value) for event in board.Scalars(name)]
        assert shown == [(r["step"], pytest.approx(r[name], rel=1e-6)) for r in read_metrics(tmp_path)]


def test_status_is_the_last_one_written(tmp_path: Path) -> None:
    assert read_status(tmp_path) is None
    write_status(tmp_path, "engine-0: starting")
    write_status(tmp_path, "step 1: training")
    status = read_status(tmp_path)
    assert status is not None and status[0] == "step 1: training" and status[1] > 1e9
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


def test_rollouts_come_back_as_written_and_nan_as_null(tmp_path: Path) -> None:
    records = rollout_records(4, 8, skill=0.5, noise=random.Random(1))
    records[0].reward = math.nan
    records[0].gradient_scale[-1] = math.nan
    RolloutLog(tmp_path).write(4, records)
    records[0].reward = None
    records[0].gradient_scale[-1] = None
    assert list(read_rollouts(tmp_path)) == list(records)


def test_the_rollout_cap_holds_over_all_writes_of_a_step(tmp_path: Path) -> None:
    log = RolloutLog(tmp_path, max_per_step=3)
    for step in (1, 1, 2):
        log.write(step, rollout_records(step, 2, skill=0.5, noise=random.Random(0)))
    assert [record.step for record in read_rollouts(tmp_path)] == [1, 1, 1, 2, 2]


def test_a_rollout_with_a_short_stream_is_refused() -> None:
    (record,) = rollout_records(1, 1, skill=0.5, noise=random.Random(0))
    fields = {name: getattr(record, name) for name in TokenRecord.__struct_fields__}
    with pytest.raises(ValueError, match=f"kept must have one entry per token: expected {len(record.tokens)}, got 1"):
        TokenRecord(**{**fields, "kept": [True]})
