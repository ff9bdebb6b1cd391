"""Effort labels: the vectors of SPEC 12, an oracle in 60 decimal digits, draws that only seed and id decide."""

import math
from decimal import Decimal, localcontext

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.config import DataError
from megatron_rl.data.conversation import EFFORTS
from megatron_rl.data.effort import (
    MIN_TRACES,
    Thresholds,
    draw_effort,
    draw_efforts,
    effort_fraction,
    effort_probabilities,
    length_thresholds,
    sample_uniform,
)
from megatron_rl.data.effort_groups import MAX_LEVELS, Group, Measured, groups_of

lengths = st.integers(1, 10**6)


@pytest.mark.parametrize(
    ("length", "u", "effort", "chance", "digits"),
    [
        (400, 0.5, "medium", 1 - 1.5e-13, 14),
        (800, 0.7, "medium", 0.5, 13),
        (800, 0.7, "high", 0.5, 13),
        (600, 0.616993, "medium", 0.99999, 5),
        (900, 0.733985, "high", 0.986356, 6),
        (1600, 0.9, "high", 1.0, 8),
    ],
)
def test_the_vectors_of_the_specification(length: int, u: float, effort: str, chance: float, digits: int) -> None:
    fraction = effort_fraction(length, 200, 800)
    assert fraction == pytest.approx(u, abs=6e-7)
    assert effort_probabilities(fraction)[effort] == pytest.approx(chance, abs=0.6 * 10**-digits)


def exact_fraction(length: int, l30: Decimal, l70: Decimal) -> Decimal:
    if l30 == l70:
        return Decimal(0) if length < l30 else Decimal(1) if length > l30 else Decimal("0.5")
    place = (Decimal(length).ln() - l30.ln()) / (l70.ln() - l30.ln())
    return min(max(Decimal("0.3") + Decimal("0.4") * place, Decimal(0)), Decimal(1))


def exact_probabilities(u: Decimal) -> dict[str, Decimal]:
    weights = {}
    for effort, centre, width in (("low", "0.15", "0.3"), ("medium", "0.5", "0.4"), ("high", "0.85", "0.3")):
        distance = (u - Decimal(centre)) / (Decimal("0.15") * Decimal(width))
        weights[effort] = (-distance * distance / 2).exp()
    return {effort: weight / sum(weights.values()) for effort, weight in weights.items()}


@given(lengths, lengths, lengths)
def test_fraction_and_chances_agree_with_sixty_decimal_digits(length: int, one: int, other: int) -> None:
    l30, l70 = min(one, other), max(one, other)
    with localcontext() as context:
        context.prec = 60
        fraction = exact_fraction(length, Decimal(l30), Decimal(l70))
        chances = exact_probabilities(fraction)
    got = effort_fraction(length, l30, l70)
    # Rounding of a logarithm, divided by a span that may be as small as log(10^6 / (10^6 - 1)).
    budget = 4 * np.finfo(np.float64).eps * (2 + math.log(10**6) / max(math.log(l70 / l30), 1e-6))
    assert abs(got - float(fraction)) <= budget
    for effort, chance in effort_probabilities(got).items():
        assert abs(chance - float(chances[effort])) <= 60 * budget + 1e-15, "no slope is steeper than about 55"


@given(lengths, lengths, lengths, lengths)
def test_a_longer_reasoning_never_has_a_smaller_fraction(a: int, b: int, one: int, other: int) -> None:
    l30, l70 = min(one, other), max(one, other)
    assert 0 <= effort_fraction(min(a, b), l30, l70) <= effort_fraction(max(a, b), l30, l70) <= 1


def test_neighbours_tie_on_their_shared_edge() -> None:
    at_30, at_70 = effort_probabilities(0.3), effort_probabilities(0.7)
    assert at_30["low"] == pytest.approx(at_30["medium"], rel=1e-12)
    assert at_70["medium"] == pytest.approx(at_70["high"], rel=1e-12)


def test_equal_percentiles_make_three_steps() -> None:
    np.testing.assert_array_equal(effort_fraction(np.array([1, 99, 100, 101]), 100, 100), [0, 0, 0.5, 1])
    assert [draw_effort(0, str(i), 100, 100, 100) for i in range(100)] == ["medium"] * 100


def test_no_reasoning_is_none_and_less_than_that_is_refused() -> None:
    assert draw_effort(0, "a", 0, 200, 800) == "none"
    for length in (-1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="0 or more tokens"):
            draw_effort(0, "a", length, 200, 800)
        with pytest.raises(ValueError, match="0 or more tokens"):
            length_thresholds([5, length])


@pytest.mark.parametrize(("l30", "l70"), [(0, 5), (-1, 5), (5, 4), (float("nan"), 5), (5, float("inf"))])
def test_percentiles_must_be_positive_and_in_order(l30: float, l70: float) -> None:
    with pytest.raises(ValueError, match="0 < l30 <= l70"):
        effort_fraction(5, l30, l70)


@pytest.mark.parametrize("u", [-1e-9, 1.0000001, float("nan")])
def test_a_fraction_lies_between_0_and_1(u: float) -> None:
    with pytest.raises(ValueError, match="u must lie in"):
        effort_probabilities(u)


def test_the_draw_is_keyed_by_seed_and_sample_id() -> None:
    ids = [f"row-{i}" for i in range(500)]
    labels = {i: draw_effort(3, i, 800, 200, 800) for i in ids}
    assert {i: draw_effort(3, i, 800, 200, 800) for i in reversed(ids)} == labels
    agreeing = sum(draw_effort(4, i, 800, 200, 800) == labels[i] for i in ids)
    assert 0.4 < agreeing / 500 < 0.6, "another seed, another coin"
    # Published labels must stay what they were: BLAKE2b of "3/row-0" and so on.
    assert [sample_uniform(3, f"row-{i}") for i in range(2)] == [0.11013419877267616, 0.7847700680556484]
    assert 0 <= sample_uniform(0, "\ud800") < 1, "a lone surrogate, which JSON can hold, is an id like any other"


@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 3000), st.integers(0, 3000)), min_size=1, max_size=30))
def test_many_rows_get_the_labels_that_each_gets_alone(rows: list[tuple[int, int, int]]) -> None:
    length, l30, over = (np.array(column) for column in zip(*rows, strict=True))
    uniforms = np.array([sample_uniform(1, str(i)) for i in range(len(rows))])
    codes = draw_efforts(uniforms, length, l30, l30 + over)
    alone = [draw_effort(1, str(i), *row) for i, row in enumerate(zip(length, l30, l30 + over, strict=True))]
    assert [EFFORTS[code] for code in codes] == alone


@pytest.mark.parametrize("length", [400, 760, 800, 850, 208])
def test_labels_come_as_often_as_their_chances_say(length: int) -> None:
    chances = effort_probabilities(effort_fraction(length, 200, 800))
    uniforms = np.array([sample_uniform(5, f"{length}/{i}") for i in range(20_000)])
    codes = draw_efforts(uniforms, length, 200, 800)
    for code, effort in enumerate(EFFORTS[1:], start=1):
        share, deviation = (codes == code).mean(), math.sqrt(chances[effort] * (1 - chances[effort]) / 20_000)
        assert abs(share - chances[effort]) <= 4 * deviation + 1e-9


def test_a_log_normal_million_splits_30_40_30() -> None:
    generator = np.random.default_rng(0)
    lengths = np.exp(generator.normal(math.log(3600), 1.6, 1_000_000)).astype(np.int64) + 1
    edges = length_thresholds(lengths)
    assert edges is not None
    labels = draw_efforts(generator.random(1_000_000), lengths, edges.l30, edges.l70)
    shares = np.bincount(labels, minlength=4) / 1_000_000
    np.testing.assert_allclose(shares, [0, 0.3, 0.4, 0.3], atol=0.01)


def test_percentiles_are_linear_interpolated_over_traces_only() -> None:
    assert length_thresholds([20, 0, 10, 0]) == Thresholds(13.0, 17.0)
    assert length_thresholds(range(12)) == Thresholds(4.0, 8.0)
    assert length_thresholds([0, 0]) is None and length_thresholds([]) is None


def groups(*rows: tuple[int, str]) -> dict[str, Group]:
    measured = Measured("data")
    for number, (length, level) in enumerate(rows):
        measured.add(f"rows.jsonl:{number + 1}", length, level)
    return {group.difficulty: group for group in groups_of(measured)}


def test_a_group_of_fewer_than_eight_traces_takes_the_percentiles_of_its_dataset() -> None:
    hard, easy = [(1000 + i, "hard") for i in range(MIN_TRACES)], [(10 + i, "easy") for i in range(MIN_TRACES - 1)]
    found = groups(*hard, *easy, (0, "easy"), (0, "easy"))
    assert found["hard"].thresholds == Thresholds(1002.1, 1004.9) and found["hard"].origin == "group"
    everything = length_thresholds([length for length, _ in hard + easy])
    assert found["easy"].thresholds == everything and found["easy"].origin == "dataset"
    assert (found["easy"].rows, found["easy"].traces) == (MIN_TRACES + 1, MIN_TRACES - 1), "length 0 is no trace"


def test_a_dataset_of_fewer_than_eight_traces_keeps_its_own_percentiles_and_says_so() -> None:
    found = groups((10, "easy"), (20, "hard"), (0, "odd"))
    assert {level: group.origin for level, group in found.items()} == {"easy": "few", "hard": "few", "odd": "few"}
    assert found["odd"].thresholds == Thresholds(13.0, 17.0)
    silent = groups((0, "easy"))["easy"]
    assert silent.thresholds is None and silent.origin == "none" and silent.as_json()["l30"] is None


def test_a_column_of_too_many_levels_is_refused_with_its_row() -> None:
    with pytest.raises(DataError, match=rf"rows.jsonl:{MAX_LEVELS + 1}: .*at most {MAX_LEVELS} levels"):
        groups(*((5, str(level)) for level in range(MAX_LEVELS + 1)))


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 500), st.sampled_from("abc")), min_size=1, max_size=60), st.randoms())
def test_groups_do_not_depend_on_the_order_of_rows(rows: list[tuple[int, str]], random: object) -> None:
    shuffled = list(rows)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert groups(*shuffled) == groups(*rows)
