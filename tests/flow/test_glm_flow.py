"""The second family from the command line: GLM-4-MoE through SFT and RL against a real engine."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from megatron_rl.cli.tiny import make_tiny


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_glm_trains_and_its_engine_agrees_after_every_update(
    sft_config: Callable[[Path], Path], tmp_path: Path, command: Callable
) -> None:
    model = make_tiny(tmp_path / "tiny", seed=0, num_train=8, num_heldout=2, family="glm4_moe").model
    layout = ["run.processes=2", "parallel.expert=2", "parallel.context=2"]
    sft = command("sft", str(sft_config(tmp_path)), f"model.path={model}", *layout)
    assert sft.wait(400) == 0, sft.text()
    trained = tmp_path / "run" / "hf"
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    before, after = (load_file(folder / "model.safetensors") for folder in (model, trained))
    assert before.keys() == after.keys()
    assert bool((before[bias] == after[bias]).all()), "training leaves the routing bias alone"
    assert bool((before["model.layers.1.mlp.gate.weight"] != after["model.layers.1.mlp.gate.weight"]).any())

    tree = {
        "run": {"dir": str(tmp_path / "rl"), "processes": 2},
        "parallel": {"pipeline": 2},
        "model": {"path": str(trained)},
        "environments": [{"name": "parity_env:ParityEnvironment"}],
        "rollout": {
            "group_size": 4,
            "max_new_tokens": 12,
            "max_turns": 2,
            "context_length": 128,
            "temperature": 0.7,
        },
        "engine": {"dtype": "float32"},
        "orchestrator": {"groups_per_step": 4, "microbatch_tokens": 512, "evaluation": {"prompts_per_split": 8}},
        "trainer": {"steps": 3, "optimizer": {"lr": 2e-4}},
    }
    config = tmp_path / "rl.yaml"
    config.write_text(yaml.safe_dump(tree))
    rl = command("rl", str(config))
    assert rl.wait(400) == 0, rl.text()
    records = [json.loads(line) for line in (tmp_path / "rl" / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "loss/total" in record]
    assert len(steps) == 3
    for record in steps:
        assert record["log_ratio/abs_mean"] <= 2e-5, record
        assert record["log_ratio/abs_max"] <= 2e-3, record
        assert record["weights/probe_max_error"] <= 1e-4, record
