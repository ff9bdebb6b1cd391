"""Run alone: what PolicyOptimizer makes of known gradients, next to AdamW written out in float64."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.distributed.device import init_process_group, start_platform

PLATFORM = start_platform("cpu")

from megatron_rl.checkpoint.convert import load_hf  # noqa: E402
from megatron_rl.checkpoint.resume import CheckpointConfig, load_training_state, save_training_state  # noqa: E402
from megatron_rl.distributed.groups import ParallelConfig, ParallelGroups, build_groups  # noqa: E402
from megatron_rl.model.build import ModelConfig, build_model  # noqa: E402
from megatron_rl.model.policy import PolicyModel  # noqa: E402
from megatron_rl.trainer.config import OptimizerConfig  # noqa: E402
from megatron_rl.trainer.optim import PolicyOptimizer  # noqa: E402

FIRST = OptimizerConfig(weight_decay=0.5, beta1=0.8, beta2=0.9, eps=1e-3, clip_grad=0.3)
OTHER = OptimizerConfig(weight_decay=0.1, beta1=0.6, beta2=0.7, eps=1e-2, clip_grad=0.2)
LR = 1e-2


class ExactAdamW:
    """Weights and moments in float64; matrices decay, vectors (norm gains) do not. (Loshchilov and Hutter 2019)"""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self.weights = {name: weight.detach().double().clone() for name, weight in weights.items()}
        self.moments = {name: (torch.zeros_like(w), torch.zeros_like(w)) for name, w in self.weights.items()}
        self.steps = 0

    def step(self, grads: Mapping[str, Tensor], config: OptimizerConfig) -> None:
        self.steps += 1
        norm = float(torch.stack([grad.double().norm() for grad in grads.values()]).norm())
        for name, grad in grads.items():
            grad = grad.double() * min(1.0, config.clip_grad / norm)
            first, second = self.moments[name]
            first.mul_(config.beta1).add_(grad, alpha=1 - config.beta1)
            second.mul_(config.beta2).add_(grad.square(), alpha=1 - config.beta2)
            direction = first / (1 - config.beta1**self.steps)
            direction /= (second / (1 - config.beta2**self.steps)).sqrt() + config.eps
            weight = self.weights[name]
            decay = config.weight_decay if weight.dim() > 1 else 0.0
            weight.mul_(1 - LR * decay).sub_(LR * direction)


def policy_of(folder: Path, groups: ParallelGroups, config: OptimizerConfig) -> tuple[PolicyModel, PolicyOptimizer]:
    model = build_model(ModelConfig(path=str(folder)), ParallelConfig(), groups, PLATFORM)
    load_hf(model, folder, groups)
    return model, PolicyOptimizer(model, groups, config)


def step_both(model: PolicyModel, policy: PolicyOptimizer, exact: ExactAdamW, config: OptimizerConfig) -> None:
    """One step of each on the same random gradients."""
    generator = torch.Generator().manual_seed(exact.steps)
    grads = {name: torch.randn(p.shape, generator=generator) for name, p in model.named_parameters()}
    policy.zero_grad()
    for name, parameter in model.named_parameters():
        parameter.main_grad.copy_(grads[name])  # type: ignore[attr-defined]
    policy.step(LR, step=exact.steps)
    exact.step(grads, config)


def largest_error(model: PolicyModel, exact: ExactAdamW) -> dict[str, float]:
    """Per kind of parameter, relative to how far a step can go."""
    errors = {"vectors": 0.0, "matrices": 0.0}
    for name, parameter in model.named_parameters():
        kind = "matrices" if parameter.dim() > 1 else "vectors"
        errors[kind] = max(errors[kind], float((parameter.double() - exact.weights[name]).abs().max()) / LR)
    return errors


def main() -> None:
    folder, work = Path(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    init_process_group(PLATFORM)
    groups = build_groups(ParallelConfig(), PLATFORM, seed=1)
    model, policy = policy_of(folder, groups, FIRST)
    exact = ExactAdamW(dict(model.named_parameters()))
    for _ in range(3):
        step_both(model, policy, exact, FIRST)
    results = {"straight": largest_error(model, exact)}
    saved = save_training_state(
        work / "checkpoints",
        step=3,
        model=model,
        optimizer=policy.optimizer,
        groups=groups,
        extra={},
        config=CheckpointConfig(),
    )
    model, policy = policy_of(folder, groups, OTHER)
    load_training_state(saved, model=model, optimizer=policy.optimizer, groups=groups)
    step_both(model, policy, exact, OTHER)
    results["resumed with other settings"] = largest_error(model, exact)
    (work / "errors.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
