"""Run by torchrun: bytes of parameters, gradients and optimizer state that each rank really holds after a step."""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.distributed.device import init_process_group, start_platform

PLATFORM = start_platform("cpu")

from megatron.core import parallel_state  # noqa: E402

from megatron_rl.checkpoint.convert import load_hf  # noqa: E402
from megatron_rl.distributed.groups import ParallelConfig, ParallelGroups, build_groups  # noqa: E402
from megatron_rl.model.build import ModelConfig, build_model  # noqa: E402
from megatron_rl.model.forward import DeviceBatch, taken_logprobs  # noqa: E402
from megatron_rl.model.policy import PolicyModel  # noqa: E402
from megatron_rl.trainer.config import OptimizerConfig  # noqa: E402
from megatron_rl.trainer.optim import PolicyOptimizer  # noqa: E402

NUM_TOKENS = 256
LAYOUTS = {
    1: [ParallelConfig()],
    2: [
        ParallelConfig(),
        ParallelConfig(tensor=2),
        ParallelConfig(expert=2),
        ParallelConfig(expert_tensor=2),
        ParallelConfig(pipeline=2),
        ParallelConfig(context=2),
    ],
}


def storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Address -> bytes of the memory below the tensors, each piece once."""
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def kept_for_backward(model: PolicyModel, groups: ParallelGroups, weights: set[int]) -> int:
    """Bytes that autograd keeps of a forward pass over NUM_TOKENS, weights and the head's logits left out."""
    ids = torch.arange(NUM_TOKENS) % 500
    borders = torch.tensor([0, NUM_TOKENS], dtype=torch.int32)
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = taken_logprobs(model, DeviceBatch(ids, ids, borders, (NUM_TOKENS,)), groups)
    assert outputs.logp.requires_grad
    sizes = {place: tensor.untyped_storage().nbytes() for place, tensor in kept.items() if place not in weights}
    return sum(sizes.values())


def measure(folder: Path, dtype: Any, parallel: ParallelConfig) -> dict[str, int]:
    """Of this rank, after one step on made-up gradients."""
    groups = build_groups(parallel, PLATFORM, seed=1)
    model = build_model(ModelConfig(path=str(folder), dtype=dtype), parallel, groups, PLATFORM)
    load_hf(model, folder, groups)
    policy = PolicyOptimizer(model, groups, OptimizerConfig())
    policy.zero_grad()
    parameters: list[Any] = list(model.parameters())
    for parameter in parameters:
        parameter.main_grad.fill_(1e-3)
    policy.step(1e-3, step=0)
    weights = storages([*parameters, *model.buffers()])
    activations = kept_for_backward(model, groups, set(weights)) if groups.world_size == 1 else 0
    optimizers: list[Any] = getattr(policy.optimizer, "chained_optimizers", [policy.optimizer])
    held: list[Any] = [p for o in optimizers for group in o.optimizer.param_groups for p in group["params"]]
    held += [v for o in optimizers for state in o.optimizer.state.values() for v in state.values()]
    state = storages(tensor for tensor in held if torch.is_tensor(tensor))
    parallel_state.destroy_model_parallel()
    return {
        "stage": groups.pp_rank,
        "parameters": sum(weights.values()),
        "gradients": sum(storages(p.main_grad for p in parameters).values()),
        "activations": activations,
        "optimizer": sum(size for address, size in state.items() if address not in weights),
    }


def main() -> None:
    folder, work = Path(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    init_process_group(PLATFORM)
    world_size = dist.get_world_size()
    measured = [
        {"dtype": dtype, "parallel": parallel.model_dump(), "rank": dist.get_rank(), **measure(folder, dtype, parallel)}
        for parallel in LAYOUTS[world_size]
        for dtype in ("float32", "bfloat16")
    ]
    (work / f"memory_{world_size}_{dist.get_rank()}.json").write_text(json.dumps(measured))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
