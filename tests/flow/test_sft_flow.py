"""megatron-rl sft from the command line: it learns, it is killed, it goes on from its checkpoint."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any


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
