"""The README's promise, on three seeds: RL raises the held-out pass rate of the SFT model."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_rl_raises_the_held_out_pass_rate(seed: int, tmp_path: Path, command: Callable) -> None:
    run = command("quickstart", "--folder", str(tmp_path / "quickstart"), "--seed", str(seed))
    assert run.wait(3000) == 0, run.text()
    print(run.text())
    rows = json.loads((tmp_path / "quickstart" / "summary.json").read_text())
    rate = {(row["name"], row["split"].split(":")[0]): row["rate"] for row in rows}
    assert len(rate) == 6
    rise = rate["after RL", "new_texts"] - rate["after SFT", "new_texts"]
    assert rise > 0, rate
    if seed == 0:
        assert rise >= 0.2, rate
    page = (tmp_path / "quickstart" / "report.html").read_text()
    assert "<html" in page and "after RL" in page
