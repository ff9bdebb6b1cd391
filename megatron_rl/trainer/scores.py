"""What other policies think of a step's tokens: scored once, before the step, and carried with its batches."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from megatron_rl_kernels import LogprobOut

from megatron_rl.config import RunError
from megatron_rl.distributed.groups import ParallelGroups
from megatron_rl.loss.kl import kl_estimate
from megatron_rl.loss.reduce import trained_mask
from megatron_rl.model.forward import DeviceBatch
from megatron_rl.records import PackedBatch
from megatron_rl.rewards.kl_penalty import SegmentKey, advantage_shifts


class FrozenPolicy(Protocol):
    """Weights that no gradient moves."""

    def score_all(self, batches: Sequence[DeviceBatch], *, temperature: float) -> list[LogprobOut]:
        """Log-probs of each batch's targets, float32 [T]; collective over the ranks that serve the batches."""
        ...


def with_scores(
    microbatches: Sequence[PackedBatch],
    policies: Mapping[str, FrozenPolicy],
    *,
    temperature: float,
    device: torch.device,
) -> list[PackedBatch]:
    """The microbatches with one more stream for each policy, called after it: reference_logp, proximal_logp."""
    scored = list(microbatches)
    batches = [DeviceBatch.from_packed(packed, device) for packed in scored] if policies else []
    for name, policy in policies.items():
        outputs = policy.score_all(batches, temperature=temperature)
        scored = [
            msgspec.structs.replace(packed, **{f"{name}_logp": out.logp.float().cpu().numpy()})
            for packed, out in zip(scored, outputs, strict=True)
        ]
    return scored


def with_kl_penalty(microbatches: Sequence[PackedBatch], groups: ParallelGroups, *, coef: float) -> list[PackedBatch]:
    """The microbatches with advantages of rewards less coef times k1 of their segment, its KL to the reference.

    Collective over data-parallel ranks: a group's rollouts may lie on several. The policy's log-prob is the engine's,
    which sampled the tokens; those without one are left out. (rewards/kl_penalty.py) RunError on every rank where the
    reference gives a trained token of any of them a log-prob that is not finite.
    """
    segments = {key: value for packed in microbatches for key, value in _segment_kl(packed).items()}
    gathered: list[Any] = [None] * groups.dp_size
    dist.all_gather_object(gathered, segments, group=groups.dp_group)
    kl = {key: value for part in gathered for key, value in part.items()}
    broken = [key for key, value in kl.items() if not math.isfinite(value)]
    if broken:
        raise RunError(
            f"the reference policy's log-probs must be finite on trained tokens, got a KL of {kl[broken[0]]} in "
            f"{len(broken)} of the step's {len(kl)} segments; look for NaN weights in trainer.reference.path (null: in "
            "model.path; after a reset: in the newest folder of RUN/reference)"
        )
    shifts = advantage_shifts({key: coef * value for key, value in kl.items()})
    return [_shifted(packed, shifts) for packed in microbatches]


def _segment_kl(packed: PackedBatch) -> dict[SegmentKey, float]:
    """Sum of k1 over each segment's trained tokens; not finite exactly where the reference's log-probs are not."""
    assert packed.engine_logp is not None and packed.reference_logp is not None, "scored before it is penalised"
    trained = trained_mask(packed.loss_mask, packed.engine_logp)
    estimate = kl_estimate(
        torch.from_numpy(np.where(trained, packed.engine_logp, 0.0)).double(),
        torch.from_numpy(np.where(trained, packed.reference_logp, 0.0)).double(),
        "k1",
    ).numpy()
    return {key: float(estimate[start:end].sum()) for key, start, end in _segments(packed)}


def _shifted(packed: PackedBatch, shifts: Mapping[SegmentKey, float]) -> PackedBatch:
    assert packed.advantages is not None, "an RL batch carries advantages"
    advantages = packed.advantages.copy()
    for key, start, end in _segments(packed):
        advantages[start:end] += shifts[key]
    return msgspec.structs.replace(packed, advantages=advantages)


def _segments(packed: PackedBatch) -> list[tuple[SegmentKey, int, int]]:
    """(which, first position, position after the last) of every document but padding."""
    return [
        (SegmentKey(info["group_id"], info["rollout"], info["segment"]), int(start), int(end))
        for info, start, end in zip(packed.info, packed.cu_seqlens[:-1], packed.cu_seqlens[1:], strict=False)
    ]
