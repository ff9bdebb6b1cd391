"""The progress display: key numbers and ETA from the run folder, few lines without a terminal, the end is shown."""

import io
import threading
import time
from pathlib import Path

from rich.console import Console

from megatron_rl.telemetry.progress import MetricsTail, RunProgress, clock, follow
from megatron_rl.telemetry.sinks import MetricsWriter, truncate_after, write_status
from megatron_rl.telemetry.values import Last, Mean, Rate


def plain_console() -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=False, width=200), out


def record(step: int, **numbers: float | None) -> dict[str, object]:
    return {"time": 1000.0 + 10 * step, "phase": "rl", "step": step, **numbers}


def test_eta_is_the_median_pace_over_a_pause() -> None:
    progress = RunProgress(10, "RL", console=plain_console()[0])
    progress.update(record(1))
    assert progress.eta_s() is None
    for step in (2, 3, 4):
        progress.update(record(step))
    progress.update({**record(5), "time": 9999.0})
    assert progress.eta_s() == 5 * 10.0


def test_the_line_shows_the_key_numbers_and_drops_what_became_unknown() -> None:
    console, out = plain_console()
    with RunProgress(4, "RL", console=console, line_every_s=0) as progress:
        progress.update(
            record(
                2,
                **{
                    "reward/mean": 0.5,
                    "pass_rate/train": 0.25,
                    "log_ratio/abs_mean": 1.23e-5,
                    "perf/tokens_per_s": 812.4,
                },
                **{"eval/pass_rate/baker/new_texts": 0.31, "eval/pass_rate/baker/new_texts/n": 256},
            )
        )
        progress.show()
        progress.update(record(3, **{"reward/mean": None}))
    first, last = out.getvalue().splitlines()
    assert first == "RL  step 2/4 50%  reward 0.500  pass 0.250  |log r| 1.2e-05  tok/s 812  new_texts 0.310"
    assert last.startswith("RL  step 3/4 75%  eta 0:10  pass 0.250")


def test_without_a_terminal_lines_are_rare_and_the_last_step_is_shown() -> None:
    console, out = plain_console()
    with RunProgress(100, "SFT", console=console, line_every_s=60) as progress:
        for step in range(1, 101):
            progress.update(record(step, **{"loss/sft": 1 / step}))
            progress.show()
    lines = out.getvalue().splitlines()
    assert len(lines) == 2 and "step 100/100 100%  loss 0.010" in lines[1]


def test_a_long_start_up_says_what_it_waits_for() -> None:
    console, out = plain_console()
    with RunProgress(10, "RL", console=console, line_every_s=0) as progress:
        progress.say("engine-0: loading [weights]", since=time.time() - 65)
        progress.show()
        progress.show()
    assert out.getvalue() == "RL  engine-0: loading [weights] (1:05)\n"


def test_the_bar_of_a_terminal_shows_step_and_status() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=160, color_system=None)
    with RunProgress(10, "RL", console=console) as progress:
        progress.update(record(4, **{"reward/mean": 0.5}))
        progress.say("step 5: training [x]")
        progress.show()
        time.sleep(0.4)
    assert "step 4/10 40%  reward 0.500" in out.getvalue() and "step 5: training [x]" in out.getvalue()


def test_the_tail_reads_every_record_once_and_starts_over_after_a_rewrite(tmp_path: Path) -> None:
    tail = MetricsTail(tmp_path)
    assert tail.new_records() == (False, [])
    writer = MetricsWriter(tmp_path, tensorboard=False)
    writer.write(1, {"x": Last(1)}, phase="rl")
    restarted, records = tail.new_records()
    assert restarted and [r["step"] for r in records] == [1]
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 2, "pha')
        file.flush()
        assert tail.new_records() == (False, [])
        file.write(b'se": "rl"}\n')
    assert [r["step"] for r in tail.new_records()[1]] == [2]
    truncate_after(tmp_path, 1, phase="rl")
    restarted, records = tail.new_records()
    assert restarted and [r["step"] for r in records] == [1]


def test_follow_shows_a_run_that_another_process_writes(tmp_path: Path) -> None:
    console, out = plain_console()
    stop = threading.Event()
    shown = threading.Thread(
        target=follow,
        args=(tmp_path, stop),
        kwargs={"total_steps": 3, "label": "RL", "console": console, "poll_s": 0.02, "line_every_s": 0.0},
    )
    shown.start()
    write_status(tmp_path, "engine-0: starting")
    writer = MetricsWriter(tmp_path, tensorboard=False)
    writer.write(1, {"reward/mean": Mean(1, 4)}, phase="rl")
    deadline = time.monotonic() + 20
    while "step 1/3" not in out.getvalue() and time.monotonic() < deadline:
        time.sleep(0.02)
    writer.write(3, {"reward/mean": Mean(3, 4), "eval/pass_rate/baker/new_texts": Rate(3, 4)}, phase="rl")
    stop.set()
    shown.join(timeout=20)
    assert not shown.is_alive()
    assert "RL  step 1/3 33%  reward 0.250" in out.getvalue()
    assert "step 3/3 100%" in out.getvalue().splitlines()[-1], "what came with the stop is shown too"


def test_clock_reads_like_a_clock() -> None:
    assert [clock(s) for s in (7, 190, 7500)] == ["0:07", "3:10", "2:05:00"]
