"""Both heads over uneven vocabulary shards, 1 to 3 ranks, in one gloo spawn."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What check_linear_heads.py wrote."""
    out = tmp_path_factory.mktemp("linear_heads") / "measured.json"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    done = subprocess.run(
        [*launcher, str(Path(__file__).with_name("check_linear_heads.py")), str(out)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return json.loads(out.read_text())


def test_sharded_heads_stay_in_the_error_budget(measured: dict[str, Any]) -> None:
    """Values, the hidden gradient summed over shards, the head gradient put together from them."""
    assert {len(case["shards"]) for case in measured["cases"]} == {1, 2, 3}
    found = {name for case in measured["cases"] for name in case["names"]}
    assert found == {"logp", "entropy", "kl", "hidden", "head"}
    over = [case for case in measured["cases"] if case["over"]]
    assert not over


def test_results_are_bitwise_equal_on_the_ranks_of_a_group(measured: dict[str, Any]) -> None:
    assert all(case["equal_on_ranks"] for case in measured["cases"])


def test_an_id_outside_the_whole_vocabulary_is_refused_on_every_rank(measured: dict[str, Any]) -> None:
    assert len(measured["refusals"]) == 2 * (1 + 2 + 3)
    for message in measured["refusals"]:
        assert "exactly one vocabulary shard, got one in 0 at position 1" in message
