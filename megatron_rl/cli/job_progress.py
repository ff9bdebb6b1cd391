"""What a person sees while many small requests are made: a bar with ETA, or a line now and then without a terminal."""

import math
import time
from collections.abc import Mapping
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from megatron_rl.data.journal import RunCounts
from megatron_rl.telemetry.progress import clock


class JobProgress:
    """The display of one run_all: `with JobProgress("prefill") as progress: progress.update(counts, total, {})`."""

    def __init__(self, label: str, *, console: Console | None = None, line_every_s: float = 15.0) -> None:
        """line_every_s: time between two lines where the console is no terminal."""
        self._label, self._line_every_s = label, line_every_s
        self._console = console or Console(stderr=True)
        self._started_s = time.monotonic()
        self._last_line_s = -math.inf
        self._unseen = ""
        self._bar: Progress | None = None
        if self._console.is_terminal:
            columns = (TextColumn("[bold]{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, TextColumn("{task.fields[shares]}"), console=self._console, transient=True)
            self._task = self._bar.add_task(label, total=None, shares="")

    def __enter__(self) -> "JobProgress":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Shows the newest numbers once more, so that the last ones are always seen."""
        if self._bar is not None:
            self._bar.stop()
        elif self._unseen:
            self._print(self._unseen)

    def update(self, counts: RunCounts, total: int, shares: Mapping[str, float]) -> None:
        """Takes how far the jobs are, and shares of what came of them by title."""
        parts = [f"{title} {share:.1%}" for title, share in shares.items()]
        if counts.failed:
            parts.append(f"failed {counts.failed}")
        if self._bar is not None:
            self._bar.update(self._task, completed=counts.seen, total=total, shares="  ".join(parts))
            return
        head = f"{counts.seen}/{total} {counts.seen / total:.0%}" if total else str(counts.seen)
        if 0 < counts.seen < total:
            pace_s = (time.monotonic() - self._started_s) / counts.seen
            head += f"  eta {clock(pace_s * (total - counts.seen))}"
        self._unseen = "  ".join([head, *parts])
        if time.monotonic() - self._last_line_s >= self._line_every_s:
            self._print(self._unseen)

    def _print(self, text: str) -> None:
        self._console.print(f"{self._label}  {text}", markup=False, highlight=False, soft_wrap=True)
        self._last_line_s = time.monotonic()
        self._unseen = ""
