"""Checkpoints of the Transformer Engine model on one GPU: conversion and resume, bit by bit."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

SIZES = dict(hidden_size=256, intermediate_size=512, moe_intermediate_size=128, head_dim=64)
make_hf_model = runpy.run_path(str(Path(__file__).parents[1] / "hf_models.py"))["make_hf_model"]


def tensors_of(policy: Any) -> dict[str, torch.Tensor]:
    """Weights, moments and master weights."""
    found = {name: tensor.detach().clone() for name, tensor in policy.ddp.module.global_tensors().items()}
    for part, optimizer in enumerate(policy.optimizer.chained_optimizers):
        for index, (weight, state) in enumerate(optimizer.optimizer.state.items()):
            found[f"{part}.{index}.weight"] = weight.detach().clone()
            found |= {f"{part}.{index}.{name}": torch.as_tensor(value).clone() for name, value in state.items()}
    return found


@pytest.mark.parametrize("name", ["plain", "glm"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_conversion_and_resume_are_bitwise(name: str, asynchronous: bool, tmp_path: Path) -> None:
    from megatron_rl.distributed.device import init_process_group, start_platform

    platform = start_platform("cuda")
    init_process_group(platform)
    from megatron.core import parallel_state
    from safetensors.torch import load_file

    from megatron_rl.checkpoint.convert import convert, load_hf
    from megatron_rl.checkpoint.resume import CheckpointConfig, latest_checkpoint, load_training_state
    from megatron_rl.checkpoint.writer import CheckpointWriter
    from megatron_rl.distributed.groups import ParallelConfig, build_groups
    from megatron_rl.model.build import ModelConfig, build_model
    from megatron_rl.trainer.config import OptimizerConfig
    from megatron_rl.trainer.optim import PolicyOptimizer

    source = make_hf_model(tmp_path / "hf", name, 0, **SIZES)
    convert(source, tmp_path / "megatron", platform_kind="cuda", dtype="bfloat16")
    parallel_state.destroy_model_parallel()
    convert(tmp_path / "megatron", tmp_path / "back")
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("hf", "back"))
    assert all(torch.equal(after[key], before[key].to(after[key].dtype)) for key in before)

    parallel_state.destroy_model_parallel()
    groups = build_groups(ParallelConfig(), platform, seed=0)
    policies = []
    for _ in range(2):
        model = build_model(ModelConfig(path=str(source), dtype="bfloat16"), ParallelConfig(), groups, platform)
        load_hf(model, source, groups)
        policies.append(PolicyOptimizer(model, groups, OptimizerConfig()))
    straight, resumed = policies
    writer = CheckpointWriter(tmp_path / "run", groups, CheckpointConfig(asynchronous=asynchronous))
    expected: dict[str, torch.Tensor] = {}
    for step in range(2):
        straight.zero_grad()
        for parameter in straight.ddp.module.parameters():
            parameter.main_grad.normal_(generator=torch.Generator("cuda").manual_seed(step))
        straight.step(1e-2, step=step)
        if step == 0:
            writer.save(1, model=straight.ddp.module, optimizer=straight.optimizer, extra={})
            expected = tensors_of(straight)
    writer.wait()
    saved = latest_checkpoint(tmp_path / "run")
    assert saved is not None
    load_training_state(saved, model=resumed.ddp.module, optimizer=resumed.optimizer, groups=groups)
    got = tensors_of(resumed)
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[key], expected[key]) for key in expected)
