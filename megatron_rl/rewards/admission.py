"""Which groups are trained. (SPEC 2; dropping groups without spread: DAPO)"""

from dataclasses import dataclass
from typing import Literal

from megatron_rl.records import Rollout, RolloutGroup

MIN_SPREAD = 1e-6
"""Rewards of a group that differ by less carry no signal."""

DropReason = Literal["too_few", "no_spread"]


@dataclass(frozen=True)
class Admission:
    """The verdict on one group."""

    kept: list[Rollout]
    """Rollouts to train, in group order; empty when the group is dropped."""
    reason: DropReason | Literal[""]
    """Why the group is dropped; empty when it is admitted."""


def admit_group(group: RolloutGroup) -> Admission:
    """Leaves out rollouts whose infrastructure failed, then drops a group with nothing to learn from.

    too_few: fewer than two rollouts left. no_spread: the rewards of all segments lie within 1e-6 of each other; a
    group that passed throughout stays if its format multipliers differ.
    """
    kept = [rollout for rollout in group.rollouts if not rollout.error]
    if len(kept) < 2:
        return Admission([], "too_few")
    rewards = [reward for rollout in kept for reward in rollout.rewards]
    if not rewards or max(rewards) - min(rewards) < MIN_SPREAD:
        return Admission([], "no_spread")
    return Admission(kept, "")
