"""KL to the reference policy as part of the reward. (Ziegler et al. 2019; Ouyang et al. 2022)

The penalty of a segment is beta times the sum over its trained tokens of log p - log p_ref, p as the engine had it.
Rewards enter advantages linearly, as R - mean_j mean_e R, so it may be taken off after the group was formed:
A' = A + (d - mean_j mean_e d) with d = -penalty. What admits a group are its rewards without the penalty.
"""

from collections.abc import Mapping
from typing import NamedTuple

from megatron_rl.rewards.advantage import segment_advantages


class SegmentKey(NamedTuple):
    """Which segment of which rollout of which group."""

    group_id: str
    rollout: int
    segment: int


def advantage_shifts(penalties: Mapping[SegmentKey, float]) -> dict[SegmentKey, float]:
    """What each segment's advantage changes by, in units of reward; penalties of every segment of whole groups.

    ValueError for a penalty that is not finite.
    """
    groups: dict[str, dict[int, list[SegmentKey]]] = {}
    for key in sorted(penalties):
        groups.setdefault(key.group_id, {}).setdefault(key.rollout, []).append(key)
    shifts: dict[SegmentKey, float] = {}
    for rollouts in groups.values():
        keys = list(rollouts.values())
        centred, _ = segment_advantages([[-penalties[key] for key in of_rollout] for of_rollout in keys])
        for of_rollout, values in zip(keys, centred, strict=True):
            shifts.update(zip(of_rollout, values, strict=True))
    return shifts
