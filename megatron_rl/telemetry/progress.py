"""What a person sees while a run works: a bar with ETA and key numbers, or a line now and then without a terminal.

Everything shown is read from the run folder (metrics.jsonl, status.json), so any process can show any run.
"""

import itertools
import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

from megatron_rl.telemetry.sinks import METRICS_FILE, parse_record, read_status

KEY_METRICS = {
    "loss/sft": "loss",
    "loss/heldout": "held-out loss",
    "reward/mean": "reward",
    "pass_rate/train": "pass",
    "log_ratio/abs_mean": "|log r|",
    "perf/tokens_per_s": "tok/s",
}
"""Metric name -> what the line calls it, in the order shown; held-out pass rates follow."""

STEPS_FOR_ETA = 20
STATUS_EVERY_S = 15.0


class MetricsTail:
    """Reads what metrics.jsonl gained since the last look; notices when the file was rewritten and starts over."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / METRICS_FILE
        self._inode = -1
        self._offset = 0
        self._number = 0

    def new_records(self) -> tuple[bool, list[dict[str, Any]]]:
        """(the file was rewritten: forget earlier records, complete records since the last look)."""
        try:
            stat = self._path.stat()
        except FileNotFoundError:
            return False, []
        restarted = stat.st_ino != self._inode or stat.st_size < self._offset
        if restarted:
            self._inode, self._offset, self._number = stat.st_ino, 0, 0
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        records = []
        for line in whole.splitlines():
            self._number += 1
            if line.strip():
                records.append(parse_record(self._path, self._number, line))
        return restarted, records


class RunProgress:
    """The display of one phase of one run: `with RunProgress(24, "RL") as progress: progress.update(record)`."""

    def __init__(
        self, total_steps: int, label: str, *, console: Console | None = None, line_every_s: float = 5.0
    ) -> None:
        """line_every_s: shortest time between two lines where the console is not a terminal."""
        self._total, self._label, self._line_every_s = total_steps, label, line_every_s
        self._console = console or Console()
        self._status = ("", time.time())
        self._shown = ("", "")
        self._last_line_s = -math.inf
        self._bar: Progress | None = None
        if self._console.is_terminal:
            self._bar = Progress(
                SpinnerColumn(),
                TextColumn("[bold]{task.description}"),
                BarColumn(bar_width=20),
                TextColumn("{task.fields[line]}"),
                console=self._console,
                refresh_per_second=4,
            )
            self._task = self._bar.add_task(label, total=total_steps, line="")
        self.reset()

    def __enter__(self) -> "RunProgress":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Shows the newest numbers once more, so that the last step is always seen."""
        if self._bar is not None:
            self._bar.update(self._task, completed=self.step, line=self._numbers())
            self._bar.stop()
        elif self._numbers() != self._shown[0]:
            self._print_line(self._numbers())

    def reset(self) -> None:
        """Forgets all records; the status stays."""
        self.step = 0
        self._latest: dict[str, float] = {}
        self._times: deque[float] = deque(maxlen=STEPS_FOR_ETA + 1)

    def update(self, record: Mapping[str, Any]) -> None:
        """Takes one record of metrics.jsonl."""
        if record["step"] > self.step:
            self.step = record["step"]
            self._times.append(float(record.get("time", time.time())))
        self._latest |= {name: value for name, value in record.items() if isinstance(value, int | float)}
        for name in [name for name, value in record.items() if value is None]:
            self._latest.pop(name, None)

    def say(self, status: str, since: float | None = None) -> None:
        """Sets the text of what the run does now; since in unix seconds, default now."""
        if status != self._status[0]:
            self._status = (status, time.time() if since is None else since)

    def eta_s(self) -> float | None:
        """Seconds to the last step at the median pace of the latest steps; None before two steps were seen."""
        if len(self._times) < 2:
            return None
        pace = statistics.median(later - earlier for earlier, later in itertools.pairwise(self._times))
        return max(0, self._total - self.step) * pace

    def show(self) -> None:
        """Refreshes the bar, or prints a line if there is news and the last line is old enough."""
        if self._bar is not None:
            status = f"  [dim]{_plain(self._status_text())}[/]" if self._status[0] else ""
            self._bar.update(self._task, completed=self.step, line=self._numbers() + status)
            return
        waited_s = time.monotonic() - self._last_line_s
        if waited_s < self._line_every_s:
            return
        numbers, status = self._numbers(), self._status[0]
        if numbers != self._shown[0]:
            self._print_line(numbers)
        elif status and (status != self._shown[1] or waited_s >= STATUS_EVERY_S):
            self._print_line(f"{numbers}  {self._status_text()}".strip())

    def _print_line(self, text: str) -> None:
        self._console.print(f"{self._label}  {text}", markup=False, highlight=False, soft_wrap=True)
        self._last_line_s = time.monotonic()
        self._shown = (self._numbers(), self._status[0])

    def _numbers(self) -> str:
        if not self._latest:
            return ""
        share = f"{self.step / self._total:.0%}" if self._total else ""
        parts = [f"step {self.step}/{self._total} {share}".strip()]
        if (eta := self.eta_s()) is not None and self.step < self._total:
            parts.append(f"eta {clock(eta)}")
        parts += [
            f"{title} {_number(name, self._latest[name])}"
            for name, title in KEY_METRICS.items()
            if name in self._latest
        ]
        return "  ".join(parts + self._heldout())

    def _heldout(self) -> list[str]:
        rates = [name for name in self._latest if name.startswith("eval/pass_rate/") and f"{name}/n" in self._latest]
        return [f"{name.rsplit('/', 1)[1]} {_number(name, self._latest[name])}" for name in rates]

    def _status_text(self) -> str:
        text, since = self._status
        return f"{text} ({clock(max(0.0, time.time() - since))})"


def follow(
    run_dir: Path,
    stop: threading.Event,
    *,
    total_steps: int,
    label: str,
    phase: str | None = None,
    console: Console | None = None,
    poll_s: float = 0.5,
    line_every_s: float = 5.0,
) -> None:
    """Shows a run until stop is set: tails metrics.jsonl and status.json, from any thread or process.

    A resumed run starts at the step it has; phase leaves out records of other phases that share the folder.
    """
    tail = MetricsTail(run_dir)
    started = time.time()
    with RunProgress(total_steps, label, console=console, line_every_s=line_every_s) as progress:
        while True:
            last_look = stop.is_set()
            restarted, records = tail.new_records()
            if restarted:
                progress.reset()
            for record in records:
                if phase is None or record["phase"] == phase:
                    progress.update(record)
            if (status := read_status(run_dir)) is not None and status[1] >= started - 1:
                progress.say(*status)
            if last_look:
                return
            progress.show()
            stop.wait(poll_s)


def clock(seconds: float) -> str:
    """Seconds as 0:07, 3:10 or 2:05:00."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def _number(name: str, value: float) -> str:
    if name == "perf/tokens_per_s":
        return f"{value:,.0f}"
    if name == "log_ratio/abs_mean":
        return f"{value:.1e}"
    return f"{value:.3f}"


def _plain(text: str) -> str:
    return text.replace("[", r"\[")
