"""SIGTERM, as a cluster sends it before it takes a node away: the run saves, ends, and goes on from there."""

import json
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from megatron_rl.checkpoint.folders import checkpoints

RL = runpy.run_path(str(Path(__file__).parent / "test_rl_flow.py"))
RARELY = ["trainer.checkpoint.every_steps=1000", "trainer.export=false", "trainer.heldout_every_steps=1000"]
TWO_RANKS = "run.processes=2"


def losses(run_dir: Path) -> dict[int, float]:
    """Step -> loss, of the complete lines of metrics.jsonl."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return {record["step"]: record["loss/sft"] for record in map(json.loads, lines)}


@pytest.mark.slow
def test_a_supervised_run_saves_on_sigterm_and_goes_on_as_if_nothing_had_happened(
    sft_run: Path, sft_config: Callable[[Path], Path], tmp_path: Path, command: Callable
) -> None:
    run_dir, config = tmp_path / "run", str(sft_config(tmp_path))
    first = command("sft", config, *RARELY, TWO_RANKS, "trainer.checkpoint.asynchronous=true")
    first.wait_for(lambda: len(losses(run_dir)) >= 3, 120)
    first.process.send_signal(signal.SIGTERM)
    assert first.wait(60) == 128 + signal.SIGTERM, first.text()
    (saved,) = checkpoints(run_dir / "checkpoints")
    last = max(losses(run_dir))
    assert saved.name == f"step_{last:06}", "no step was lost"
    assert f"stopped by SIGTERM after step {last}" in (run_dir / "logs" / "trainer.log").read_text()

    second = command("sft", config, *RARELY, TWO_RANKS, f"trainer.steps={last + 2}")
    assert second.wait(120) == 0, second.text()
    got, expected = losses(run_dir), losses(sft_run)
    assert sorted(got) == list(range(1, last + 3))
    for step, loss in got.items():
        assert loss == pytest.approx(expected[step], rel=1e-5), f"step {step} trained on something else"


def test_ranks_under_torchrun_save_once_however_many_processes_get_the_signal(
    sft_config: Callable[[Path], Path], tmp_path: Path
) -> None:
    """Slurm signals every process of a job, and torchrun passes its own on: one stop, not two."""
    run_dir, log = tmp_path / "run", tmp_path / "log"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    training = ["-m", "megatron_rl.cli.train_sft", str(sft_config(tmp_path)), *RARELY, TWO_RANKS]
    with log.open("w") as stream:
        agent = subprocess.Popen([*torchrun, *training, "trainer.steps=1000"], stdout=stream, stderr=stream)
    try:
        deadline = time.monotonic() + 120
        while len(losses(run_dir)) < 2:
            assert agent.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        for process in [*psutil.Process(agent.pid).children(), agent]:
            process.send_signal(signal.SIGTERM)
        agent.wait(60)
    finally:
        agent.kill()
    (saved,) = checkpoints(run_dir / "checkpoints")
    assert saved.name == f"step_{max(losses(run_dir)):06}"
    assert log.read_text().count("stopped by SIGTERM after step") == 1, "rank 0 says it"


@pytest.mark.slow
def test_an_rl_run_saves_while_engines_and_orchestrator_still_live(
    sft_run: Path, tmp_path: Path, command: Callable
) -> None:
    """The checkpoint holds the orchestrator's state, which is asked for after the signal."""
    run_dir = tmp_path / "run"
    run = command("rl", str(RL["rl_config"](sft_run / "hf", tmp_path)), *RARELY[:1])
    run.wait_for(lambda: RL["last_trained_step"](run_dir) >= 2, 180)
    run.process.send_signal(signal.SIGTERM)
    assert run.wait(90) == 128 + signal.SIGTERM, run.text()
    (saved,) = checkpoints(run_dir / "checkpoints")
    assert saved.name == f"step_{RL['last_trained_step'](run_dir):06}"
    assert (saved / "extra" / "orchestrator").is_file()
    assert not RL["processes_of"](run_dir)
