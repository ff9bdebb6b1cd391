"""Where metrics go: metrics.jsonl is the record, TensorBoard and pages are drawn from the same numbers.

One line per write: {"time": unix seconds, "phase": ..., "step": ..., metric name: number or null, ...}.
JSON has no NaN and no infinity: a value that is not finite is null. A Rate becomes four names: name, name/low and
name/high (95% interval) and name/n (outcomes counted).
"""

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_rl.config.errors import DataError
from megatron_rl.telemetry import jsonl
from megatron_rl.telemetry.rollouts import truncate_rollouts
from megatron_rl.telemetry.snr_log import truncate_snr
from megatron_rl.telemetry.values import Last, Max, Mean, Min, Rate, Sum, Value

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

METRICS_FILE = "metrics.jsonl"
STATUS_FILE = "status.json"
RESERVED = ("time", "phase", "step")


def flatten_metrics(metrics: Mapping[str, Value | float]) -> dict[str, float]:
    """Every metric as plain numbers, NaN and infinity included; ValueError for anything else."""
    numbers: dict[str, float] = {}
    for name, value in metrics.items():
        if name in RESERVED:
            raise ValueError(f"a metric cannot be called {name!r}: {', '.join(RESERVED)} describe the record")
        match value:
            case Rate():
                low, high = value.interval()
                numbers |= {name: value.result(), f"{name}/low": low, f"{name}/high": high, f"{name}/n": value.count}
            case Mean() | Sum() | Max() | Min() | Last():
                numbers[name] = float(value.result())
            case int() | float():
                numbers[name] = float(value)
            case _:
                raise ValueError(f"metric {name!r} must be a telemetry value or a number, got {type(value).__name__}")
    return numbers


class MetricsWriter:
    """Appends to run_dir/metrics.jsonl and, if asked, to run_dir/tensorboard/<phase>. One writer per run folder."""

    def __init__(self, run_dir: Path, *, tensorboard: bool = True) -> None:
        """Creates the folder and cuts off a torn last line, so a restart goes on where a killed run stopped."""
        self._run_dir = run_dir
        self._tensorboard = tensorboard
        self._boards: dict[str, SummaryWriter] = {}
        run_dir.mkdir(parents=True, exist_ok=True)
        jsonl.drop_torn_line(run_dir / METRICS_FILE)

    def write(self, step: int, metrics: Mapping[str, Value | float], *, phase: str) -> None:
        """Adds one record; it is in the file when this returns."""
        numbers = flatten_metrics(metrics)
        record: dict[str, Any] = {"time": round(time.time(), 3), "phase": phase, "step": step}
        record |= {name: number if math.isfinite(number) else None for name, number in numbers.items()}
        jsonl.append_line(self._run_dir / METRICS_FILE, json.dumps(record, allow_nan=False).encode())
        if self._tensorboard:
            board = self._board(phase, step)
            for name, number in numbers.items():
                board.add_scalar(name, number, step)
            board.flush()

    def close(self) -> None:
        """Ends the TensorBoard files; metrics.jsonl needs no end."""
        for board in self._boards.values():
            board.close()
        self._boards.clear()

    def _board(self, phase: str, step: int) -> "SummaryWriter":
        """The phase's board. purge_step hides what a killed run wrote beyond the step where this one goes on."""
        if phase not in self._boards:
            from torch.utils.tensorboard import SummaryWriter

            folder = self._run_dir / "tensorboard" / phase
            self._boards[phase] = SummaryWriter(str(folder), purge_step=step)
        return self._boards[phase]


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """All records in order; a torn last line is left out, a missing file is no records.

    DataError names file and line of anything else that is not a record.
    """
    path = run_dir / METRICS_FILE
    return [parse_record(path, number, line) for number, line in jsonl.whole_lines(path)]


def parse_record(path: Path, number: int, line: bytes) -> dict[str, Any]:
    """One line of metrics.jsonl; DataError with file and line if it is not a record."""
    try:
        record = json.loads(line)
    except ValueError as error:
        raise DataError(f"{path}:{number}: every line must be JSON, got {line[:60]!r}; remove the line") from error
    if not (isinstance(record, dict) and isinstance(record.get("step"), int) and isinstance(record.get("phase"), str)):
        raise DataError(f"{path}:{number}: a record has a step and a phase, got {line[:60]!r}; remove the line")
    return record


def truncate_after(run_dir: Path, step: int, *, phase: str) -> None:
    """Drops what a resumed run will write again: this phase's metrics, rollouts and calibrations beyond its checkpoint.

    Step 0 means from the start: everything of the phase goes, evaluations at step 0 included. Torn lines go too.
    """
    path = run_dir / METRICS_FILE

    def keep(number: int, line: bytes) -> bool:
        record = parse_record(path, number, line)
        return record["phase"] != phase or 0 < step >= record["step"]

    jsonl.keep_lines(path, keep)
    truncate_rollouts(run_dir, step, phase=phase)
    truncate_snr(run_dir, step, phase=phase)


def write_status(run_dir: Path, text: str) -> None:
    """What the run does now, in one line for people: run_dir/status.json {"text", "time"}, replaced atomically."""
    run_dir.mkdir(parents=True, exist_ok=True)
    temporary = run_dir / f"{STATUS_FILE}.{os.getpid()}.tmp"
    temporary.write_text(json.dumps({"text": text, "time": round(time.time(), 3)}) + "\n", encoding="utf-8")
    temporary.replace(run_dir / STATUS_FILE)


def read_status(run_dir: Path) -> tuple[str, float] | None:
    """(text, unix seconds since when) of status.json; None before the first one."""
    try:
        status = json.loads((run_dir / STATUS_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return str(status["text"]), float(status["time"])
