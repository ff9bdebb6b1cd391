"""Rewards to advantages, and admitted groups to samples. (SPEC 2; Kolibri report, 2026; no division: Dr. GRPO)"""

import math
from collections.abc import Sequence

import numpy as np

from megatron_rl.records import Rollout, RolloutGroup, Sample
from megatron_rl.rewards.admission import Admission


def segment_advantages(rewards: Sequence[Sequence[float]]) -> tuple[list[list[float]], float]:
    """(A[i][e], baseline) of R[i][e], the reward of segment e of rollout i.

    baseline = mean over rollouts of the mean over their segments, so that a rollout counts once however often its
    context was re-rendered; A = R - baseline. Segment advantages need not sum to zero.
    ValueError: no rollouts, a rollout without segments, a reward that is not finite.
    """
    if not rewards or not all(rewards):
        raise ValueError(
            f"a group needs a rollout, and each rollout a segment reward, got {[len(r) for r in rewards]} rewards; "
            "leave failed rollouts out first (admit_group)"
        )
    for rollout, of_segments in enumerate(rewards):
        if not all(map(math.isfinite, of_segments)):
            raise ValueError(
                f"rewards must be finite, got {list(of_segments)} of rollout {rollout}; a verifier that cannot decide "
                "must fail the rollout or give 0"
            )
    baseline = math.fsum(math.fsum(of_segments) / len(of_segments) for of_segments in rewards) / len(rewards)
    return [[reward - baseline for reward in of_segments] for of_segments in rewards], baseline


def group_samples(group: RolloutGroup, admission: Admission) -> list[Sample]:
    """One Sample per segment of the rollouts that admission keeps; none if it drops the group.

    Trained are the tokens the engine sampled, token 0 never; each carries its segment's advantage. info goes to the
    log of sampled rollouts. ValueError: a rollout whose rewards are not one per segment, or not finite.
    """
    if admission.reason:
        return []
    for rollout in admission.kept:
        if len(rollout.rewards) != len(rollout.segments):
            raise ValueError(
                f"rollout {rollout.rollout_id} must have one reward per segment ({len(rollout.segments)}), got "
                f"{len(rollout.rewards)}; the environment gives them when the episode ends"
            )
    advantages, _ = segment_advantages([rollout.rewards for rollout in admission.kept])
    index_of = {rollout.rollout_id: index for index, rollout in enumerate(group.rollouts)}
    return [
        _sample(group, rollout, index_of[rollout.rollout_id], segment, advantage)
        for rollout, of_segments in zip(admission.kept, advantages, strict=True)
        for segment, advantage in enumerate(of_segments)
    ]


def _sample(group: RolloutGroup, rollout: Rollout, index: int, segment_index: int, advantage: float) -> Sample:
    segment = rollout.segments[segment_index]
    loss_mask = np.array(segment.sampled, dtype=bool)
    loss_mask[:1] = False
    return Sample(
        sample_id=f"{rollout.rollout_id}/{segment_index}",
        token_ids=segment.token_ids,
        loss_mask=loss_mask,
        advantages=np.full(len(segment.token_ids), advantage, dtype=np.float32),
        engine_logp=segment.engine_logp,
        weight_version=segment.weight_version,
        info={
            "reward": rollout.rewards[segment_index],
            "environment": group.prompt.environment,
            "group_id": group.group_id,
            "rollout": index,
            "segment": segment_index,
            "finish_reason": rollout.finish_reason,
        },
    )
