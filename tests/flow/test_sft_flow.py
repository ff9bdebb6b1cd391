"""megatron-rl sft from the command line: it learns, it is killed, it goes on from its checkpoint."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.cli.supervisor import RunLock


def metrics_of(run_dir: Path) -> list[dict[str, Any]]:
    """Complete lines of metrics.jsonl."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def test_a_killed_run_resumes_and_ends_like_an_uninterrupted_one(
    sft_run: Path, sft_config: Callable[[Path], Path], tmp_path: Path, command: Callable
) -> None:
    run_dir = tmp_path / "run"
    config = str(sft_config(tmp_path))
    first = command("sft", config)
    first.wait_for(lambda: any(r["step"] >= 6 for r in metrics_of(run_dir)), 120)
    os.killpg(first.process.pid, signal.SIGKILL)
    first.process.wait()
    second = command("sft", config)
    assert second.wait(240) == 0, second.text()
    assert "resuming" in second.text() and "step_00" in second.text()

    expected, got = metrics_of(sft_run), metrics_of(run_dir)
    assert [r["step"] for r in got] == list(range(1, len(expected) + 1)), "every step is recorded exactly once"
    for before, after in zip(expected, got, strict=True):
        assert after["loss/sft"] == before["loss/sft"], f"step {before['step']} trained on something else"
        assert after.get("loss/heldout") == before.get("loss/heldout")
    assert expected[-1]["loss/heldout"] < 0.5 * expected[11]["loss/heldout"], "the model learns"
    assert (run_dir / "hf" / "config.json").exists()
    assert "<html" in (run_dir / "report.html").read_text()


STREAM = ["data.packing={kind: stream, open_bins: 2, buffer: 5}", "data.microbatch_tokens=128", "run.processes=2"]
TIMED = ("time", "perf/")


@pytest.mark.slow
def test_two_ranks_with_streams_of_their_own_are_killed_and_end_like_uninterrupted_ones(
    sft_config: Callable[[Path], Path], tmp_path: Path, command: Callable
) -> None:
    """In the middle of a buffer, on several passes; every recorded number but times is the same."""
    for name in ("straight", "killed"):
        (tmp_path / name).mkdir()
    straight = command("sft", str(sft_config(tmp_path / "straight")), *STREAM)
    assert straight.wait(240) == 0, straight.text()
    config, run_dir = str(sft_config(tmp_path / "killed")), tmp_path / "killed" / "run"
    first = command("sft", config, *STREAM)
    first.wait_for(lambda: any(r["step"] >= 14 for r in metrics_of(run_dir)), 120)
    os.killpg(first.process.pid, signal.SIGKILL)
    first.process.wait()
    second = command("sft", config, *STREAM)
    assert second.wait(240) == 0 and "resuming" in second.text(), second.text()

    expected, got = metrics_of(tmp_path / "straight" / "run"), metrics_of(run_dir)
    assert len(got) == len(expected) == 36 and expected[-1]["data/epochs/rows"] > 2
    for before, after in zip(expected, got, strict=True):
        same = [{k: v for k, v in record.items() if not k.startswith(TIMED)} for record in (before, after)]
        assert same[0] == same[1], f"step {before['step']}"


LAYOUTS = {
    "DP2": [],
    "TP2-EP2": ["parallel.tensor=2", "parallel.expert=2"],
    "TP2-ETP2": ["parallel.tensor=2", "parallel.expert_tensor=2"],
    "PP2": ["parallel.pipeline=2", "data.microbatch_tokens=128"],
    "CP2": ["parallel.context=2", "model.recompute=full"],
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_two_ranks_under_torchrun_train_like_one(
    sft_run: Path, sft_config: Callable[[Path], Path], tmp_path: Path, layout: list[str]
) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "megatron_rl.cli.train_sft", str(sft_config(tmp_path))]
    command += ["run.processes=2", "trainer.steps=6", "trainer.heldout_every_steps=6", "trainer.export=false", *layout]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    expected, got = metrics_of(sft_run), metrics_of(tmp_path / "run")
    assert len(got) == 6
    for one, two in zip(expected, got, strict=False):
        for name in ("loss/sft", "grad_norm"):
            assert two[name] == pytest.approx(one[name], rel=1e-5), f"{name} of step {one['step']}"
        assert two["tokens/trained"] == one["tokens/trained"]


def test_ranks_that_torchrun_starts_are_checked_like_those_of_the_command(
    sft_config: Callable[[Path], Path], tmp_path: Path
) -> None:
    """Once, by rank 0, before any rank waits for another; and a run folder serves one run."""
    config = str(sft_config(tmp_path))
    train = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    train += ["-m", "megatron_rl.cli.train_sft", config, "run.processes=2"]
    bad = subprocess.run([*train, "context_length=2000"], capture_output=True, text=True, timeout=120, check=False)
    assert bad.returncode != 0
    errors = [line for line in bad.stderr.splitlines() if "error:" in line]
    assert len(errors) == 1 and "context_length must not exceed the model's 512 positions" in errors[0], bad.stderr
    assert not (tmp_path / "run" / "config.yaml").exists()

    (tmp_path / "run").mkdir(exist_ok=True)
    with RunLock(tmp_path / "run"):
        held = subprocess.run(train, capture_output=True, text=True, timeout=120, check=False)
    assert held.returncode != 0 and "a run folder serves one run at a time" in held.stderr, held.stderr
