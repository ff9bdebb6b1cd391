"""One optimizer step over this rank's microbatches."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron_rl.records import PackedBatch
from megatron_rl.telemetry.values import merge_metrics
from megatron_rl.trainer.optim import PolicyOptimizer

LossFunction = Callable[[PackedBatch], tuple[torch.Tensor, dict[str, Any]]]
"""Microbatch -> (scalar already divided by the global denominator, metrics)."""


def train_step(
    policy: PolicyOptimizer, microbatches: Sequence[PackedBatch], loss_function: LossFunction, *, lr: float
) -> tuple[float, dict[str, Any]]:
    """Forward and backward of every microbatch, then one update. Returns (gradient norm, this rank's metrics).

    Every rank of a data-parallel group must bring the same number of microbatches, or the reduction hangs;
    gradients are reduced once, with the last one.
    """
    policy.zero_grad()
    collected = []
    for index, microbatch in enumerate(microbatches):
        last = index == len(microbatches) - 1
        with contextlib.nullcontext() if last else policy.ddp.no_sync():
            loss, metrics = loss_function(microbatch)
            loss.backward()
        collected.append(metrics)
    return policy.step(lr), merge_metrics(collected)
