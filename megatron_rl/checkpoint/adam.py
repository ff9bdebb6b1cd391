"""The state of AdamW inside Megatron's distributed optimizer: there before it is loaded, one step count for all."""

from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer


def adam_optimizers(optimizer: MegatronOptimizer) -> list[DistributedOptimizer]:
    """Dense and expert part; a rank without experts, such as a pipeline stage of dense layers, has the first only."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    assert all(isinstance(part, DistributedOptimizer) for part in parts), "build it by trainer.optim.PolicyOptimizer"
    return [part for part in parts if not part.is_stub_optimizer]


def start_adam(optimizer: MegatronOptimizer) -> None:
    """Gives every parameter zero moments where it has none: Megatron does so only in the first step."""
    for part in adam_optimizers(optimizer):
        part.init_state_fn(part.optimizer, part.config)
    if _torch_states(optimizer) and any("step" not in state for state in _torch_states(optimizer)):
        set_adam_steps(optimizer, 0)


def adam_steps(optimizer: MegatronOptimizer) -> int:
    """Optimizer steps done, for the bias correction."""
    found = {int(state["step"]) for state in _torch_states(optimizer)}
    found |= {int(group["step"]) for group in _fused_groups(optimizer) if "step" in group}
    assert len(found) <= 1, f"all parameters have done the same number of steps, got {sorted(found)}"
    return found.pop() if found else 0


def set_adam_steps(optimizer: MegatronOptimizer, steps: int) -> None:
    """A tensor of its own for every parameter: AdamW counts in place, a shared one would count them all."""
    for state in _torch_states(optimizer):
        state["step"] = torch.tensor(float(steps), dtype=torch.float32)
    for group in _fused_groups(optimizer):
        group["step"] = steps


def restart_adam(optimizer: MegatronOptimizer) -> None:
    """Moments of zero and no step done, as before the first step; master weights stay."""
    start_adam(optimizer)
    for part in adam_optimizers(optimizer):
        for state in part.optimizer.state.values():
            for moment in ("exp_avg", "exp_avg_sq"):
                state[moment].zero_()
    set_adam_steps(optimizer, 0)


def _torch_states(optimizer: MegatronOptimizer) -> list[dict[str, Any]]:
    """torch's AdamW counts per parameter."""
    parts = [part.optimizer for part in adam_optimizers(optimizer)]
    return [state for part in parts if isinstance(part, torch.optim.AdamW) for state in part.state.values()]


def _fused_groups(optimizer: MegatronOptimizer) -> list[dict[str, Any]]:
    """Transformer Engine's and Apex's AdamW count per group, but not where this rank has no part of its parameters."""
    parts = [part.optimizer for part in adam_optimizers(optimizer) if not isinstance(part.optimizer, torch.optim.AdamW)]
    return [group for part in parts for group in part.param_groups if group["params"]]
