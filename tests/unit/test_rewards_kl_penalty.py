"""KL in the reward: shifting advantages afterwards is forming them from penalised rewards."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.rewards.advantage import segment_advantages
from megatron_rl.rewards.kl_penalty import SegmentKey, advantage_shifts

reward = st.floats(-2, 2)
group = st.lists(st.lists(st.tuples(reward, reward), min_size=1, max_size=3), min_size=2, max_size=4)


@given(st.lists(group, min_size=1, max_size=3))
def test_shifted_advantages_are_those_of_penalised_rewards(groups: list[list[list[tuple[float, float]]]]) -> None:
    penalties = {
        SegmentKey(str(g), j, e): penalty
        for g, rollouts in enumerate(groups)
        for j, segments in enumerate(rollouts)
        for e, (_, penalty) in enumerate(segments)
    }
    shifts = advantage_shifts(penalties)
    assert shifts.keys() == penalties.keys()
    for g, rollouts in enumerate(groups):
        plain, _ = segment_advantages([[r for r, _ in segments] for segments in rollouts])
        penalised, _ = segment_advantages([[r - p for r, p in segments] for segments in rollouts])
        for j, segments in enumerate(rollouts):
            for e in range(len(segments)):
                shifted = plain[j][e] + shifts[SegmentKey(str(g), j, e)]
                assert shifted == pytest.approx(penalised[j][e], abs=1e-12)


def test_a_rollout_that_strays_twice_as_far_is_pushed_down_and_the_others_up() -> None:
    penalties = {SegmentKey("g", 0, 0): 0.2, SegmentKey("g", 1, 0): 0.4}
    assert advantage_shifts(penalties) == pytest.approx({SegmentKey("g", 0, 0): 0.1, SegmentKey("g", 1, 0): -0.1})


def test_a_penalty_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        advantage_shifts({SegmentKey("g", 0, 0): math.nan, SegmentKey("g", 1, 0): 0.0})
