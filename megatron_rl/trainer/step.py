"""One optimizer step over this rank's microbatches."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_rl.config import RunError
from megatron_rl.distributed.groups import ParallelGroups
from megatron_rl.loss.reduce import BrokenValuesError
from megatron_rl.model.forward import DeviceBatch, head_logprobs
from megatron_rl.model.pipeline import from_last_stage, run_microbatches, score_all_tokens
from megatron_rl.records import PackedBatch
from megatron_rl.telemetry.values import merge_metrics
from megatron_rl.trainer.guards import LossFunction
from megatron_rl.trainer.optim import PolicyOptimizer


def train_step(
    policy: PolicyOptimizer,
    microbatches: Sequence[PackedBatch],
    loss_function: LossFunction,
    groups: ParallelGroups,
    *,
    step: int,
    lr: float,
    device: torch.device,
    temperature: float = 1.0,
) -> tuple[float, dict[str, Any]]:
    """Forward and backward of every microbatch, then one update. Returns (gradient norm, this rank's metrics).

    Every rank of a data-parallel group must bring the same number of microbatches, or the reduction hangs; gradients
    are reduced once, after the last one. Ranks that serve the same microbatches return the same metrics.
    step is 0-based. RunError on every rank, with the weights as they were, where guards.py refuses the step.
    """
    policy.zero_grad()
    guarded = policy.guard.watch(loss_function)
    batches = [DeviceBatch.from_packed(microbatch, device) for microbatch in microbatches]

    def score(hidden: Tensor, number: int) -> tuple[Tensor, dict[str, Any]]:
        out = head_logprobs(policy.ddp, hidden, batches[number], groups, temperature=temperature)
        return guarded(out, microbatches[number])

    collected = run_microbatches(policy.ddp, batches, score, groups, train=True)
    metrics = from_last_stage(merge_metrics(collected), groups)
    update = policy.step(lr, step=step)
    return update.grad_norm, {**metrics, **update.metrics}


@torch.no_grad()
def evaluate(
    policy: PolicyOptimizer,
    microbatches: Sequence[PackedBatch],
    loss_function: LossFunction,
    groups: ParallelGroups,
    *,
    device: torch.device,
) -> dict[str, Any]:
    """Metrics of the microbatches without gradients, the same on all ranks that serve them.

    RunError where the model gives a value that is not finite.
    """
    batches = [DeviceBatch.from_packed(batch, device) for batch in microbatches]
    outputs = score_all_tokens(policy.ddp, batches, groups, temperature=1.0)
    try:
        return merge_metrics([loss_function(out, batch)[1] for out, batch in zip(outputs, microbatches, strict=True)])
    except BrokenValuesError as error:
        raise RunError(
            f"the evaluated loss must be finite: {error}; restart, and the run resumes from its last checkpoint"
        ) from error
