"""What a person sees of many requests: in a log file, and at a terminal."""

import io

import pytest
from rich.console import Console

from megatron_rl.cli import job_progress
from megatron_rl.cli.job_progress import JobProgress
from megatron_rl.data.journal import RunCounts


class Clock:
    """Stands for time.monotonic."""

    now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


def test_a_log_gets_a_line_now_and_then_and_always_the_last_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, file = Clock(), io.StringIO()
    monkeypatch.setattr(job_progress, "time", clock)
    with JobProgress("prefill", console=Console(file=file, width=40), line_every_s=15) as progress:
        for seen in range(1, 41):
            clock.now_s += 2
            progress.update(RunCounts(found=1, done=seen - 1, failed=0), 50, {"in language": 0.5})
        clock.now_s += 1
        progress.update(RunCounts(found=1, done=40, failed=2), 50, {})
    lines = file.getvalue().splitlines()
    assert lines[0] == "prefill  1/50 2%  eta 1:38  in language 50.0%"
    assert lines[1] == "prefill  9/50 18%  eta 1:22  in language 50.0%"
    assert len(lines) == 1 + 4 + 1 and lines[-1] == "prefill  43/50 86%  eta 0:13  failed 2"


def test_nothing_to_do_prints_nothing() -> None:
    file = io.StringIO()
    with JobProgress("prefill", console=Console(file=file)):
        pass
    assert not file.getvalue()


def test_a_terminal_gets_a_bar_that_goes_away() -> None:
    file = io.StringIO()
    with JobProgress("prefill", console=Console(file=file, force_terminal=True, width=120)) as progress:
        progress.update(RunCounts(done=3, failed=1), 8, {"in language": 0.25})
    shown = file.getvalue()
    assert "prefill" in shown and "4/8" in shown and "in language 25.0%  failed 1" in shown
