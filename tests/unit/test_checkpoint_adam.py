"""The step count of AdamW, where an optimizer counts per group as Transformer Engine's does."""

from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_rl.checkpoint.adam import adam_steps, set_adam_steps


class FusedAdam:
    """Counts as Transformer Engine's FusedAdam: in a group of its own parameters, never in an empty one."""

    def __init__(self, sizes: list[int]) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": [torch.zeros(1)] * size} for size in sizes]

    def step(self) -> None:
        for group in self.param_groups:
            if group["params"]:
                group["step"] = group.get("step", 0) + 1


def distributed(fused: FusedAdam) -> DistributedOptimizer:
    part = DistributedOptimizer.__new__(DistributedOptimizer)
    part.is_stub_optimizer, part.optimizer = False, fused  # type: ignore[assignment]
    return part


def test_a_rank_without_parameters_of_a_group_goes_on_counting_after_a_resume() -> None:
    """Weight decay makes two groups; of a small model a data-parallel rank may have nothing of one."""
    dense, experts = FusedAdam([2, 0]), FusedAdam([0, 3])
    optimizer: Any = SimpleNamespace(chained_optimizers=[distributed(dense), distributed(experts)])
    set_adam_steps(optimizer, 4)
    assert adam_steps(optimizer) == 4
    for part in (dense, experts):
        part.step()
    assert adam_steps(optimizer) == 5
