"""Two trainer ranks share the work of publishing, and share its errors."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """version -> {"errors": per rank, "values": tensor -> distinct values in the engine}."""
    result = tmp_path_factory.mktemp("weight_sync") / "result.json"
    script = Path(__file__).with_name("check_weight_sync.py")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {name: value for name, value in os.environ.items() if name != "UCX_TLS"}
    process = subprocess.run(
        [*torchrun, str(script), str(result)],
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 0, process.stderr[-5000:]
    return json.loads(result.read_text(encoding="utf-8"))


def test_each_rank_writes_its_own_share_of_one_version(outcomes: dict[str, Any]) -> None:
    for version in (1, 3):
        outcome = outcomes[str(version)]
        assert outcome["errors"] == ["", ""]
        written = [value for values in outcome["values"].values() for value in values]
        assert len(outcome["values"]) == len(written) == 9, "no tensor is a mixture"
        assert set(written) == {100.0 * version, 100.0 * version + 1}, "both ranks wrote"


def test_fault_of_one_rank_is_raised_on_all_and_the_engine_keeps_its_version(outcomes: dict[str, Any]) -> None:
    first, second = outcomes["2"]["errors"]
    assert first == second and "version 2 were not published" in first and "got float32 [1, 3]" in first
    assert outcomes["2"]["values"] == outcomes["1"]["values"]
