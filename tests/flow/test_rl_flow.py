"""megatron-rl rl from the command line, with real engine, trainer and weight transfer, through every kind of death."""

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import psutil
import pytest
import yaml

STEPS = 8


def rl_config(model: Path, folder: Path) -> Path:
    """Writes a config for a few quick steps on a task that the model sometimes passes."""
    tree = {
        "run": {"dir": str(folder / "run"), "platform": "cpu"},
        "model": {"path": str(model), "dtype": "float32"},
        "environments": [{"name": "parity_env:ParityEnvironment"}],
        "rollout": {"group_size": 4, "max_new_tokens": 12, "max_turns": 2, "context_length": 128},
        "engine": {"dtype": "float32"},
        "orchestrator": {"groups_per_step": 4, "microbatch_tokens": 512, "evaluation": {"prompts_per_split": 8}},
        "trainer": {
            "steps": STEPS,
            "eval_every_steps": STEPS,
            "optimizer": {"lr": 2e-4},
            "checkpoint": {"every_steps": 2},
        },
    }
    path = folder / "rl.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def records(run_dir: Path) -> list[dict[str, Any]]:
    """Complete lines of metrics.jsonl."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def last_trained_step(run_dir: Path) -> int:
    """The newest step in metrics.jsonl that trained, 0 without one."""
    return max((r["step"] for r in records(run_dir) if "loss/total" in r), default=0)


def processes_of(run_dir: Path, *words: str) -> list[psutil.Process]:
    """Live processes whose command line, or whose parent's, names the run folder, and that has all words."""
    found = []
    for process in psutil.process_iter(["cmdline", "environ", "status"]):
        line = " ".join(process.info["cmdline"] or [])
        belongs = str(run_dir) in line or (process.info["environ"] or {}).get("MEGATRON_RL_TEST_RUN") == str(run_dir)
        if belongs and process.info["status"] != psutil.STATUS_ZOMBIE and all(word in line for word in words):
            found.append(process)
    return found


def assert_nothing_is_left(run_dir: Path) -> None:
    """No process of the run lives and its ports are free."""
    assert not processes_of(run_dir), [p.cmdline() for p in processes_of(run_dir)]
    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    ports = {urlparse(url).port for url in [*config["engine"]["urls"], config["orchestrator"]["address"]]}
    listening = [c.laddr for c in psutil.net_connections("tcp") if c.laddr and c.status == psutil.CONN_LISTEN]
    open_ports = {address.port for address in listening}
    assert not ports & open_ports, f"ports still open: {ports & open_ports}"


def assert_ends_naming(run: Any, part: str, run_dir: Path, killed_at: float) -> None:
    """The command ends within 30 s of the kill, non-zero, naming the part and its log; nothing is left."""
    status = run.wait(60)
    assert time.monotonic() - killed_at < 30, f"took {time.monotonic() - killed_at:.0f} s to notice and stop"
    assert status != 0, run.text()
    assert part in run.text() and f"{part}" in run.text() and ".log" in run.text(), run.text()
    assert_nothing_is_left(run_dir)


def assert_numbers_agree(run_dir: Path) -> None:
    """Float32 on both sides: log-probs of trainer and engine agree in every step, and after every update."""
    steps = [r for r in records(run_dir) if "loss/total" in r]
    assert steps
    for record in steps:
        assert record["log_ratio/abs_mean"] <= 2e-5, record
        assert record["log_ratio/abs_max"] <= 2e-3, record
        assert record["weights/probe_max_error"] <= 1e-4, record


def test_a_run_survives_every_death_and_both_sides_agree(
    sft_run: Path, tmp_path: Path, command: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    monkeypatch.setenv("MEGATRON_RL_TEST_RUN", str(run_dir))
    config = str(rl_config(sft_run / "hf", tmp_path))

    # kill -9 of a trainer rank, temperature 1
    run = command("rl", config)
    run.wait_for(lambda: last_trained_step(run_dir) >= 2 and (run_dir / "checkpoints" / "step_000002").exists(), 180)
    rank = max(processes_of(run_dir, "train_rl"), key=lambda p: p.create_time())
    rank.kill()
    assert_ends_naming(run, "trainer", run_dir, time.monotonic())
    assert_numbers_agree(run_dir)

    # kill -9 of the engine, temperature .7, two tensor-parallel ranks that go on from one rank's checkpoint
    run = command("rl", config, "rollout.temperature=0.7", "run.processes=2", "parallel.tensor=2")
    run.wait_for(lambda: (run_dir / "checkpoints" / "step_000004").exists(), 180)
    assert "resuming" in run.text() and "rollout.temperature" in run.text()
    processes_of(run_dir, "megatron_rl.engine.server")[0].kill()
    assert_ends_naming(run, "engine-0", run_dir, time.monotonic())
    assert_numbers_agree(run_dir)

    # Ctrl-C, two expert-parallel ranks, which are two data-parallel ranks too
    run = command("rl", config, "rollout.temperature=0.7", "run.processes=2", "parallel.expert=2")
    run.wait_for(lambda: (run_dir / "checkpoints" / "step_000006").exists(), 180)
    run.process.send_signal(signal.SIGINT)
    killed_at = time.monotonic()
    assert run.wait(60) == 130, run.text()
    assert time.monotonic() - killed_at < 30
    assert_nothing_is_left(run_dir)

    # the rest, on one rank again
    run = command("rl", config, "rollout.temperature=0.7")
    assert run.wait(240) == 0, run.text()
    assert_nothing_is_left(run_dir)
    assert_numbers_agree(run_dir)
    trained = [r["step"] for r in records(run_dir) if "loss/total" in r]
    assert trained == list(range(1, STEPS + 1)), "every step is recorded exactly once"
    assert (run_dir / "hf" / "model.safetensors.index.json").exists() or list((run_dir / "hf").glob("*.safetensors"))
    assert "<html" in (run_dir / "report.html").read_text()
