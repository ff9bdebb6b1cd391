"""The estimate of a rank's memory against what ranks really allocate."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_rl.distributed.config import ParallelConfig
from megatron_rl.model.config import ModelConfig
from megatron_rl.model.folder import read_hf_config
from megatron_rl.model.memory import stage_memory


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_weights_gradients_and_optimizer_state_are_estimated_within_15_percent(
    world_size: int, model_folder: Path, tmp_path: Path, run_script: Callable[..., None]
) -> None:
    run_script("check_memory.py", world_size, model_folder / "tied", tmp_path)
    measured = [one for file in tmp_path.glob("memory_*.json") for one in json.loads(file.read_text())]
    assert measured
    for real in measured:
        estimate = stage_memory(
            read_hf_config(model_folder / "tied"),
            ModelConfig(path="", dtype=real["dtype"]),
            ParallelConfig(**real["parallel"]),
            world_size=world_size,
            microbatch_tokens=256,
            platform="cpu",
        )[real["stage"]]
        for part in ("parameters", "gradients", "optimizer"):
            assert getattr(estimate, part) == pytest.approx(real[part], rel=0.15), (part, real)
        # In bfloat16 the indices and float32 statistics that the formula leaves out weigh too much at this width.
        if world_size == 1 and real["dtype"] == "float32":
            assert estimate.activations == pytest.approx(real["activations"], rel=0.25), real
