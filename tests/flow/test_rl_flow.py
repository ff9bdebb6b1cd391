"""megatron-rl rl from the command line, with real engine, trainer and weight transfer, through every kind of death."""

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
            "optimizer": {"lr": 1e-4},
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


def ports_of(run_dir: Path) -> set[int]:
    """Ports on which processes of the run listen, but for those of the kernel's choice, which anybody may get next."""
    connections = [c for process in processes_of(run_dir) for c in process.net_connections("tcp")]
    return {c.laddr.port for c in connections if c.laddr and c.status == psutil.CONN_LISTEN and c.laddr.port < 32768}


def assert_nothing_is_left(run_dir: Path, ports: set[int]) -> None:
    """No process of the run lives and its ports are free."""
    assert not processes_of(run_dir), [p.cmdline() for p in processes_of(run_dir)]
    listening = [c.laddr for c in psutil.net_connections("tcp") if c.laddr and c.status == psutil.CONN_LISTEN]
    open_ports = {address.port for address in listening}
    assert not ports & open_ports, f"ports still open: {ports & open_ports}"


def assert_ends(run: Any, run_dir: Path, act: Callable[[], Any]) -> int:
    """Exit status of the command after act, which it must notice within 30 s; nothing is left behind."""
    ports, acted_at = ports_of(run_dir), time.monotonic()
    assert ports, "the engine listens"
    act()
    status = run.wait(60)
    assert time.monotonic() - acted_at < 30, f"took {time.monotonic() - acted_at:.0f} s to notice and stop"
    assert_nothing_is_left(run_dir, ports)
    return status


def newest(run_dir: Path, word: str) -> psutil.Process:
    """The newest process of the run with this word in its command line: a rank rather than its launcher or keeper."""
    return max(processes_of(run_dir, word), key=lambda process: process.create_time())


def assert_numbers_agree(run_dir: Path) -> None:
    """Float32 on both sides: log-probs of trainer and engine agree in every step, and after every update."""
    steps = [r for r in records(run_dir) if "loss/total" in r]
    assert steps
    for record in steps:
        assert record["log_ratio/abs_mean"] <= 2e-5, record
        assert record["log_ratio/abs_max"] <= 2e-3, record
        assert record["weights/probe_max_error"] <= 1e-4, record


@pytest.mark.timeout(900)
@pytest.mark.parametrize("every_death", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["one", "every"])
def test_a_run_survives_every_death_and_both_sides_agree(
    every_death: bool, sft_run: Path, tmp_path: Path, command: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    monkeypatch.setenv("MEGATRON_RL_TEST_RUN", str(run_dir))
    config = str(rl_config(sft_run / "hf", tmp_path))

    # kill -9 of a trainer rank, temperature 1
    run = command("rl", config)
    run.wait_for(lambda: last_trained_step(run_dir) >= 2 and (run_dir / "checkpoints" / "step_000002").exists(), 180)
    assert assert_ends(run, run_dir, newest(run_dir, "train_rl").kill) == 1
    assert "trainer died" in run.text() and "logs/trainer.log" in run.text(), run.text()
    assert_numbers_agree(run_dir)

    if every_death:
        # kill -9 of the engine, temperature .7, two tensor-parallel ranks that go on from one rank's checkpoint
        run = command("rl", config, "rollout.temperature=0.7", "run.processes=2", "parallel.tensor=2")
        run.wait_for(lambda: (run_dir / "checkpoints" / "step_000004").exists(), 180)
        assert "rollout.temperature" in run.text()
        assert assert_ends(run, run_dir, newest(run_dir, "megatron_rl.engine.server").kill) == 1
        assert "engine-0 died" in run.text() and "logs/engine-0.log" in run.text(), run.text()
        assert_numbers_agree(run_dir)

        # Ctrl-C, two expert-parallel ranks, which are two data-parallel ranks too
        run = command("rl", config, "rollout.temperature=0.7", "run.processes=2", "parallel.expert=2")
        run.wait_for(lambda: (run_dir / "checkpoints" / "step_000006").exists(), 180)
        assert assert_ends(run, run_dir, lambda: run.process.send_signal(signal.SIGINT)) == 130
        assert "Ctrl-C stopped" in run.text() and "same command again" in run.text(), run.text()

    # the rest, on two pipeline stages
    run = command("rl", config, "rollout.temperature=0.7", "run.processes=2", "parallel.pipeline=2")
    run.wait_for(lambda: bool(ports_of(run_dir)), 180)
    ports = ports_of(run_dir)
    assert "resuming" in run.text(), run.text()
    assert run.wait(240) == 0, run.text()
    assert_nothing_is_left(run_dir, ports)
    assert_numbers_agree(run_dir)
    trained = [r["step"] for r in records(run_dir) if "loss/total" in r]
    assert trained == list(range(1, STEPS + 1)), "every step is recorded exactly once"
    assert (run_dir / "hf" / "model.safetensors.index.json").exists() or list((run_dir / "hf").glob("*.safetensors"))
    assert "<html" in (run_dir / "report.html").read_text()


@pytest.mark.slow
def test_an_engine_that_computes_something_else_stops_the_run(sft_run: Path, tmp_path: Path, command: Callable) -> None:
    run_dir = tmp_path / "run"
    run = command("rl", str(rl_config(sft_run / "hf", tmp_path)), "engine.dtype=bfloat16")
    assert run.wait(180) == 1, run.text()
    assert "trainer died" in run.text() and "probe_tolerance" in run.text() and "engine.dtype" in run.text(), run.text()
    assert not any("loss/total" in record for record in records(run_dir)), "no step was trained"
    assert not processes_of(run_dir)
