"""Advantages, admission and the samples that leave them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.records import Prompt, Rollout, RolloutGroup, Sample, Segment
from megatron_rl.rewards.admission import Admission, admit_group
from megatron_rl.rewards.advantage import group_samples, segment_advantages

REWARDS = st.lists(st.lists(st.floats(-10, 10), min_size=1, max_size=4), min_size=1, max_size=8)


def segment(sampled: list[int], first_token: int = 0) -> Segment:
    """A token per entry; 1 where the engine sampled it."""
    size, flags = len(sampled), np.array(sampled, dtype=bool)
    return Segment(
        token_ids=np.arange(first_token, first_token + size, dtype=np.int32),
        sampled=flags,
        engine_logp=np.where(flags, -0.5, np.nan).astype(np.float32),
        weight_version=np.where(flags, 3, -1).astype(np.int32),
    )


def rollout(index: int, rewards: list[float], *, error: str = "") -> Rollout:
    segments = [segment([0, 0, 1, 1], first_token=100 * index + 10 * e) for e in range(len(rewards))]
    return Rollout(f"baker/train/7#{index}", segments, rewards, [], "error" if error else "stop", error=error)


def group(*rollouts: Rollout) -> RolloutGroup:
    return RolloutGroup("g7", Prompt("baker/train/7", "baker", []), list(rollouts))


def seed_group() -> RolloutGroup:
    return group(*(rollout(i, r) for i, r in enumerate([[1.0], [0.75, 1.0], [0.95], [0.0]])))


def test_segment_advantages_give_the_worked_group() -> None:
    advantages, baseline = segment_advantages([[1.0], [0.75, 1.0], [0.95], [0.0]])
    assert baseline == pytest.approx(0.70625, abs=1e-15)
    want = [[0.29375], [0.04375, 0.29375], [0.24375], [-0.70625]]
    for got, exact in zip(advantages, want, strict=True):
        assert got == pytest.approx(exact, abs=1e-15)
    assert sum(sum(a) for a in advantages) == pytest.approx(0.16875, abs=1e-15)


@given(REWARDS)
def test_rollout_means_of_advantages_sum_to_zero(rewards: list[list[float]]) -> None:
    advantages, _ = segment_advantages(rewards)
    assert sum(sum(a) / len(a) for a in advantages) == pytest.approx(0, abs=1e-9)


@given(REWARDS, st.integers(0, 7), st.integers(2, 5))
def test_splitting_a_rollout_into_equal_segments_changes_no_advantage(
    rewards: list[list[float]], which: int, times: int
) -> None:
    """A rollout counts once in the baseline, however often its context was re-rendered."""
    which %= len(rewards)
    split = [r * times if i == which else r for i, r in enumerate(rewards)]
    before, baseline = segment_advantages(rewards)
    after, baseline_after = segment_advantages(split)
    assert baseline_after == pytest.approx(baseline, abs=1e-9)
    assert after[which] == pytest.approx(before[which] * times, abs=1e-9)


@given(REWARDS, st.floats(-100, 100))
def test_a_constant_on_all_rewards_changes_no_advantage(rewards: list[list[float]], shift: float) -> None:
    before, _ = segment_advantages(rewards)
    after, _ = segment_advantages([[x + shift for x in r] for r in rewards])
    for one, other in zip(before, after, strict=True):
        assert other == pytest.approx(one, abs=1e-9)


@pytest.mark.parametrize(
    ("rewards", "says"),
    [
        ([], r"a group needs a rollout.*got \[\] rewards"),
        ([[1.0], []], r"each rollout a segment reward, got \[1, 0\] rewards"),
        ([[1.0], [float("nan")]], r"must be finite, got \[nan\] of rollout 1"),
        ([[float("inf")]], r"must be finite, got \[inf\] of rollout 0"),
    ],
)
def test_rewards_without_a_meaning_are_refused(rewards: list[list[float]], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        segment_advantages(rewards)


def test_failed_rollouts_leave_before_the_baseline() -> None:
    whole = group(rollout(0, [1.0]), rollout(1, [0.0]), rollout(2, [-50.0], error="engine gone"))
    admission = admit_group(whole)
    assert [r.rollout_id[-1] for r in admission.kept] == ["0", "1"] and admission.reason == ""
    values = {s.sample_id: s.advantages for s in group_samples(whole, admission)}
    assert {name: set(a.tolist()) for name, a in values.items() if a is not None} == {
        "baker/train/7#0/0": {0.5},
        "baker/train/7#1/0": {-0.5},
    }


@pytest.mark.parametrize(
    ("rollouts", "reason"),
    [
        ([], "too_few"),
        ([rollout(0, [1.0])], "too_few"),
        ([rollout(0, [1.0]), rollout(1, [0.0], error="timeout")], "too_few"),
        ([rollout(0, [1.0]), rollout(1, [1.0])], "no_spread"),
        ([rollout(0, [0.0]), rollout(1, [9e-7])], "no_spread"),
        ([rollout(0, [0.0]), rollout(1, [2e-6])], ""),
        ([rollout(0, [1.0]), rollout(1, [1.0]), rollout(2, [0.0], error="timeout")], "no_spread"),
        ([rollout(0, [1.0]), rollout(1, [0.75, 1.0])], ""),
    ],
    ids=["empty", "one", "one left", "all pass", "below 1e-6", "above 1e-6", "spread by failure", "format differs"],
)
def test_admission(rollouts: list[Rollout], reason: str) -> None:
    admission = admit_group(group(*rollouts))
    assert admission.reason == reason
    assert bool(admission.kept) == (not reason)
    assert bool(group_samples(group(*rollouts), admission)) == (not reason)


def test_every_segment_becomes_one_sample_with_its_own_advantage() -> None:
    whole = seed_group()
    samples = group_samples(whole, admit_group(whole))
    assert [s.sample_id for s in samples] == [f"baker/train/7#{r}" for r in ("0/0", "1/0", "1/1", "2/0", "3/0")]
    for sample, advantage in zip(samples, [0.29375, 0.04375, 0.29375, 0.24375, -0.70625], strict=True):
        assert sample.advantages is not None and sample.advantages.dtype == np.float32
        assert sample.advantages.tolist() == pytest.approx([advantage] * 4, abs=1e-6)
    second: Sample = samples[2]
    source = whole.rollouts[1].segments[1]
    for name in ("token_ids", "engine_logp", "weight_version"):
        np.testing.assert_array_equal(getattr(second, name), getattr(source, name))
    assert second.loss_mask.tolist() == [False, False, True, True]
    assert second.info == {
        "reward": 1.0,
        "environment": "baker",
        "group_id": "g7",
        "rollout": 1,
        "segment": 1,
        "finish_reason": "stop",
    }


def test_samples_know_their_place_in_the_group_that_was_rolled_out() -> None:
    whole = group(rollout(0, [0.0], error="timeout"), rollout(1, [1.0]), rollout(2, [0.0]))
    assert [s.info["rollout"] for s in group_samples(whole, admit_group(whole))] == [1, 2]


def test_token_zero_is_never_trained_and_the_rollout_is_left_as_it_was() -> None:
    starts_sampled = Rollout("x#0", [segment([1, 1, 0])], [1.0], [], "stop")
    whole = group(starts_sampled, rollout(1, [0.0]))
    sample = group_samples(whole, admit_group(whole))[0]
    assert sample.loss_mask.tolist() == [False, True, False]
    assert starts_sampled.segments[0].sampled.tolist() == [True, True, False]


def test_a_rollout_needs_one_reward_per_segment() -> None:
    broken = Rollout("x#0", [segment([0, 1]), segment([0, 1])], [1.0], [], "stop")
    whole = group(broken, rollout(1, [0.0]))
    with pytest.raises(ValueError, match=r"rollout x#0 must have one reward per segment \(2\), got 1"):
        group_samples(whole, Admission(whole.rollouts, ""))
