"""What tests of policy losses share. For runpy: tests are no package."""

from typing import Any

import torch
from torch import Tensor

from megatron_rl.loss.config import LossConfig
from megatron_rl.loss.guard import NoiseTable
from megatron_rl.loss.policy import PolicyStats, policy_loss
from megatron_rl.loss.trust_region import POLICY_LOSSES

KINDS = list(POLICY_LOSSES)
NOISE = NoiseTable(shrink=(0.5,) * 7, lower=(-0.3,) * 7, upper=(0.4,) * 7)
GUARDS: list[dict[str, Any]] = [
    {"kind": "off"},
    {"kind": "tis", "high": 1.5},
    {"kind": "clip", "low": 0.5, "high": 2.0},
    {"kind": "reject", "low": 0.5, "high": 2.0},
    {"kind": "clamp", "low": 0.5, "high": 2.0},
    {"kind": "shrink"},
    {"kind": "derived"},
]
GUARDED = ("btv", "dppo_kl", "none")
"""Policy losses that leave the ratio to a guard."""


def config_of(kind: str, *, g_max: float | None = None, **options: Any) -> LossConfig:
    """The objective with this policy loss at its default options, unbounded unless g_max is given."""
    return LossConfig.model_validate({"policy": {"kind": kind}, "g_max": g_max, **options})


def tensor(*values: float) -> Tensor:
    """A float64 stream."""
    return torch.tensor(values, dtype=torch.float64)


def loss_of(
    config: LossConfig, policy_logp: Tensor, engine_logp: Tensor, advantages: Tensor, **streams: Tensor
) -> tuple[Tensor, PolicyStats]:
    """policy_loss, each token a document of its own unless sequence_ids are given."""
    streams = {"sequence_ids": torch.arange(len(policy_logp)), **streams}
    return policy_loss(policy_logp, engine_logp, advantages, config=config, noise=NOISE, **streams)


def slope_of(config: LossConfig, policy_logp: Tensor, *streams: Tensor, **more: Tensor) -> tuple[Tensor, Tensor]:
    """(values, d loss / d log p)."""
    policy_logp = policy_logp.clone().requires_grad_()
    loss, _ = loss_of(config, policy_logp, *streams, **more)
    return loss.detach(), torch.autograd.grad(loss.sum(), policy_logp)[0]
