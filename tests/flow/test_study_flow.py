"""The study of regularisers from its command line, two settings for two steps, then its page."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "studies" / "regularisers" / "run.py"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_settings_are_trained_skipped_when_finished_and_written_down(tmp_path: Path) -> None:
    folder, page = tmp_path / "study", tmp_path / "regularisers.md"

    def study(*arguments: str) -> str:
        command = [sys.executable, str(SCRIPT), *arguments, "--folder", str(folder), "--steps", "2"]
        done = subprocess.run(
            command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=1100
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    chosen = ["run", "--settings", "k3plus_0.3,noise_clamp", "--seeds", "0"]
    assert "2 runs, 0 finished before" in study(*chosen)
    assert "2 runs, 2 finished before" in study(*chosen)
    study("table", "--page", str(page))
    text = page.read_text()
    assert "2 runs of 2 steps" in text
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert len(rows) == 4 and not any("–" in row for row in rows[1:] if "start" not in row), text
    assert page.with_suffix(".svg").read_text().startswith("<svg")
