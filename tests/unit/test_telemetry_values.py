"""Metrics that carry their reduction: any split merges to the same value; Wilson's interval against its definition."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.telemetry.values import (
    Last,
    Max,
    Mean,
    Min,
    Rate,
    Sum,
    Value,
    from_wire,
    merge_metrics,
    reduce_over_ranks,
    to_wire,
)

# Whole numbers add without rounding, so that equality is exact.
WHOLE = st.integers(-(2**40), 2**40).map(float)
COUNTS = st.integers(0, 2**20)


def values_of(kind: str) -> st.SearchStrategy[Value]:
    return {
        "mean": st.builds(Mean, WHOLE, COUNTS),
        "sum": st.builds(Sum, WHOLE),
        "max": st.builds(Max, WHOLE),
        "min": st.builds(Min, WHOLE),
        "last": st.builds(Last, WHOLE),
        "rate": st.tuples(COUNTS, COUNTS).map(lambda pair: Rate(min(pair), max(pair))),
    }[kind]


KINDS = ["mean", "sum", "max", "min", "last", "rate"]


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_merging_does_not_depend_on_how_the_parts_are_bracketed(kind: str, data: st.DataObject) -> None:
    a, b, c = (data.draw(values_of(kind)) for _ in range(3))
    left = merge_metrics([merge_metrics([{"m": a}, {"m": b}]), {"m": c}])
    right = merge_metrics([{"m": a}, merge_metrics([{"m": b}, {"m": c}])])
    assert left == right
    if kind != "last":
        assert merge_metrics([{"m": b}, {"m": a}]) == merge_metrics([{"m": a}, {"m": b}])


@given(numbers=st.lists(WHOLE, min_size=1, max_size=20), cuts=st.lists(st.integers(0, 20), max_size=4))
def test_any_split_over_ranks_gives_the_value_of_the_whole(numbers: list[float], cuts: list[int]) -> None:
    borders = sorted({0, len(numbers), *(min(cut, len(numbers)) for cut in cuts)})
    parts = [numbers[a:b] for a, b in pairwise(borders)]
    merged = merge_metrics(
        {
            "mean": Mean(sum(part), len(part)),
            "sum": Sum(sum(part)),
            "max": Max(max(part)),
            "min": Min(min(part)),
            "last": Last(part[-1]),
        }
        for part in parts
    )
    assert {name: value.result() for name, value in merged.items()} == {
        "mean": sum(numbers) / len(numbers),
        "sum": sum(numbers),
        "max": max(numbers),
        "min": min(numbers),
        "last": numbers[-1],
    }


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_the_wire_keeps_every_value(kind: str, data: st.DataObject) -> None:
    value = data.draw(values_of(kind))
    wire = to_wire(value)
    assert wire[0] == kind and len(wire) == 3
    assert from_wire(wire) == value and type(from_wire(wire)) is type(value)


def test_a_metric_that_only_some_ranks_have_counts_as_they_measured_it() -> None:
    ranks = [{"a": Mean(6.0, 2.0), "b": Last(1.0)}, {"a": Mean(0.0, 1.0), "c": Max(5.0)}]
    gathered = [{name: to_wire(value) for name, value in rank.items()} for rank in ranks]
    results = [reduce_over_ranks(rank, lambda _: gathered) for rank in ranks]
    assert results[0] == results[1] == {"a": Mean(6.0, 3.0), "b": Last(1.0), "c": Max(5.0)}


def test_kinds_that_disagree_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'loss/kl' must have one kind everywhere, got Mean and Max"):
        merge_metrics([{"loss/kl": Mean(1, 1)}, {"loss/kl": Max(1)}])


def test_nothing_counted_is_nan_and_a_nan_part_shows() -> None:
    assert math.isnan(Mean(0.0, 0).result()) and math.isnan(Rate(0, 0).result())
    for broken, sound in ((Max(math.nan), Max(1.0)), (Min(math.nan), Min(1.0))):
        for parts in ((broken, sound), (sound, broken)):
            assert math.isnan(merge_metrics({"m": part} for part in parts)["m"].result())


def test_values_that_are_no_metric_are_refused() -> None:
    with pytest.raises(ValueError, match="0 <= successes <= count, got 3 of 2"):
        Rate(3, 2)
    with pytest.raises(ValueError, match="got 'median'"):
        from_wire(("median", 1.0, 0.0))
    with pytest.raises(ValueError, match="got str"):
        to_wire("x")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("successes", "count", "low", "high"),
    # Newcombe 1998 (Statistics in Medicine 17, table I, method 3) prints these to four digits.
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_interval_agrees_with_published_values(successes: int, count: int, low: float, high: float) -> None:
    assert Rate(successes, count).interval() == pytest.approx((low, high), abs=5e-5)


@given(st.tuples(st.integers(0, 500), st.integers(1, 500)).map(lambda pair: (min(pair), max(pair))))
def test_interval_ends_solve_the_score_equation(pair: tuple[int, int]) -> None:
    """|rate - p| = z sqrt(p (1-p) / n) at both ends, the definition that Wilson's closed form solves."""
    successes, count = pair
    rate = Rate(successes, count)
    low, high = rate.interval()
    assert 0 <= low <= rate.result() <= high <= 1
    for p in (low, high):
        if 0 < p < 1:
            assert abs(rate.result() - p) == pytest.approx(1.959963984540054 * math.sqrt(p * (1 - p) / count), rel=1e-6)


def test_interval_of_nothing_is_everything() -> None:
    assert Rate(0, 0).interval() == (0.0, 1.0)
