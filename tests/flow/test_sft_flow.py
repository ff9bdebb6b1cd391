"""megatron-rl sft from the command line: it learns, it is killed, it goes on from its checkpoint."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml


def sft_config(tiny: Path, folder: Path, **trainer: Any) -> Path:
    """Writes a config for a few quick steps and returns its path."""
    tree = {
        "run": {"dir": str(folder / "run"), "platform": "cpu"},
        "model": {"path": str(tiny / "model"), "dtype": "float32"},
        "context_length": 256,
        "data": {
            "train": [str(tiny / "train.jsonl")],
            "heldout": [str(tiny / "heldout.jsonl")],
            "samples_per_step": 8,
            "microbatch_tokens": 1024,
        },
        "trainer": {
            "steps": 12,
            "heldout_every_steps": 6,
            "optimizer": {"lr": 3e-3},
            "checkpoint": {"every_steps": 4},
            **trainer,
        },
    }
    path = folder / "sft.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def metrics_of(run_dir: Path) -> list[dict[str, Any]]:
    """Complete lines of metrics.jsonl."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def test_a_killed_run_resumes_and_ends_like_an_uninterrupted_one(tiny: Path, tmp_path: Path, command: Callable) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    run = command("sft", str(sft_config(tiny, whole)))
    assert run.wait(240) == 0, run.text()

    first = command("sft", str(sft_config(tiny, broken)))
    run_dir = broken / "run"
    first.wait_for(lambda: any(r["step"] >= 6 for r in metrics_of(run_dir)), 120)
    os.killpg(first.process.pid, signal.SIGKILL)
    first.process.wait()
    second = command("sft", str(sft_config(tiny, broken)))
    assert second.wait(240) == 0, second.text()
    assert "resuming" in second.text()

    expected, got = metrics_of(whole / "run"), metrics_of(run_dir)
    assert [r["step"] for r in got] == list(range(1, 13)), "every step is recorded exactly once"
    for before, after in zip(expected, got, strict=True):
        assert after["loss/sft"] == before["loss/sft"], f"step {before['step']} trained on something else"
    assert expected[-1]["loss/heldout"] < expected[5]["loss/heldout"], "the model learns"
    assert (run_dir / "hf" / "config.json").exists()
    assert "<html" in (run_dir / "report.html").read_text()
