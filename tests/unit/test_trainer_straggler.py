"""A rank that is slow step after step is named; one slow step, or slow steps of changing ranks, are not."""

import logging
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.distributed.groups import Place
from megatron_rl.trainer.straggler import PATIENCE, SLOW, StragglerWatch, sets_that_meet

SECONDS = st.lists(st.floats(0.01, 100.0), min_size=2, max_size=9)


def warnings_of(steps: Sequence[Sequence[float]]) -> list[bool]:
    watch = StragglerWatch(range(len(steps[0])), is_writer=False)
    return [bool(watch.update(rank_s, step=step) and watch.warning) for step, rank_s in enumerate(steps)]


@given(rank_s=SECONDS)
def test_metrics_are_the_largest_time_the_median_and_who_took_longest(rank_s: list[float]) -> None:
    metrics = StragglerWatch(range(len(rank_s)), is_writer=False).update(rank_s, step=0)
    ordered = sorted(rank_s)
    middle = (ordered[len(ordered) // 2] + ordered[(len(ordered) - 1) // 2]) / 2
    assert metrics["perf/rank_s_max"].result() == ordered[-1]
    assert metrics["perf/rank_s_median"].result() == pytest.approx(middle)
    assert rank_s[int(metrics["perf/slowest_rank"].result())] == ordered[-1]


def test_one_rank_has_nobody_to_compare_with() -> None:
    watch = StragglerWatch([0], is_writer=True)
    assert [watch.update([9.0], step=step) for step in range(20)] == [{}] * 20
    assert watch.warning is None


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_a_rank_above_the_bound_is_named_from_the_last_step_of_patience_on(world_size: int) -> None:
    slow = [1.0] * (world_size - 1) + [SLOW + 0.01]
    assert warnings_of([slow] * (PATIENCE + 2)) == [False] * (PATIENCE - 1) + [True] * 3
    at_the_bound = [1.0] * (world_size - 1) + [SLOW]
    assert not any(warnings_of([at_the_bound] * (PATIENCE + 2)))


def test_a_pause_or_another_slow_rank_starts_the_count_again() -> None:
    first, second, level = [9.0, 1.0, 1.0], [1.0, 9.0, 1.0], [1.0, 1.0, 1.0]
    assert not any(warnings_of([first] * (PATIENCE - 1) + [level] + [first] * (PATIENCE - 1)))
    assert not any(warnings_of([first, second] * PATIENCE))


def test_the_writer_alone_logs_once_every_so_many_steps_with_rank_and_times(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    for is_writer in (False, True):
        watch = StragglerWatch(range(3), is_writer=is_writer)
        for step in range(2 * PATIENCE):
            watch.update([1.0, 1.0, 3.0], step=step)
        assert len(caplog.records) == (2 if is_writer else 0)
    assert "rank 2 is slow: 3.00 s" in caplog.records[0].message
    assert f"step {PATIENCE} " in caplog.records[0].message


def test_a_slow_replica_is_named_whichever_of_its_ranks_takes_longest() -> None:
    """Ranks that wait for each other take turns at being the slowest by a hair."""
    watch = StragglerWatch([0, 0, 2, 2], is_writer=False)
    for step in range(PATIENCE):
        watch.update([1.0, 1.0, 2.0 + step % 2, 2.5], step=step)
    assert watch.warning is not None and watch.warning.startswith("one of ranks 2, 3 is slow: 2.50 s")


def test_one_set_of_ranks_has_nobody_to_compare_with() -> None:
    watch = StragglerWatch([0, 0], is_writer=False)
    for step in range(2 * PATIENCE):
        assert watch.update([1.0, 9.0], step=step)["perf/slowest_rank"].result() == 1
    assert watch.warning is None


def test_ranks_meet_that_share_a_batch_or_the_tokens_of_experts() -> None:
    def place(tp: int, dp: int, ep: int, edp: int) -> Place:
        return Place(tp=tp, cp=0, dp=dp, pp=0, etp=0, ep=ep, edp=edp)

    tensor = [place(0, 0, 0, 0), place(1, 0, 0, 1), place(0, 1, 0, 2), place(1, 1, 0, 3)]
    assert sets_that_meet(tensor) == [0, 0, 2, 2]
    experts = [place(0, dp, dp % 2, dp // 2) for dp in range(4)]
    assert sets_that_meet(experts) == [0, 0, 2, 2]
    assert sets_that_meet([place(0, dp, 0, dp) for dp in range(3)]) == [0, 1, 2]
