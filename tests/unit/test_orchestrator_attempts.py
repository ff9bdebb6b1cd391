"""pass@k and the interval of a share over prompts, against enumeration and simulation."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.cli.evaluate import eval_rows
from megatron_rl.orchestrator.attempts import pass_at_k, rate_over_prompts
from megatron_rl.orchestrator.evaluate import HeldOut
from megatron_rl.telemetry.values import Mean, Rate


@pytest.mark.parametrize("num_attempts", range(1, 8))
def test_pass_at_k_is_the_share_of_subsets_that_hold_a_pass(num_attempts: int) -> None:
    for num_passed in range(num_attempts + 1):
        outcomes = [index < num_passed for index in range(num_attempts)]
        for k in range(1, num_attempts + 1):
            subsets = [any(subset) for subset in itertools.combinations(outcomes, k)]
            assert pass_at_k(num_attempts, num_passed, k) == float(Fraction(sum(subsets), len(subsets)))


@given(st.integers(1, 12), st.integers(1, 12), st.fractions(0, 1, max_denominator=50))
def test_pass_at_k_is_unbiased(num_attempts: int, k: int, chance: Fraction) -> None:
    """Its exact mean over the number of passes is the chance that k fresh attempts hold one."""
    k = min(k, num_attempts)
    mean = sum(
        float(_binomial(num_attempts, passed, chance)) * pass_at_k(num_attempts, passed, k)
        for passed in range(num_attempts + 1)
    )
    assert mean == pytest.approx(float(1 - (1 - chance) ** k), abs=1e-12)


def _binomial(n: int, c: int, chance: Fraction) -> Fraction:
    ways = sum(1 for _ in itertools.combinations(range(n), c))
    return ways * chance**c * (1 - chance) ** (n - c)


def test_pass_at_k_neither_overflows_nor_loses_a_small_chance() -> None:
    assert pass_at_k(100_000, 1, 3) == 3e-5
    assert pass_at_k(5000, 2500, 2500) == 1.0 and pass_at_k(5000, 0, 2500) == 0.0


@pytest.mark.parametrize(
    ("arguments", "said"), [((4, 5, 1), "num_passed"), ((4, -1, 1), "num_passed"), ((4, 2, 5), "k")]
)
def test_pass_at_k_refuses_impossible_counts(arguments: tuple[int, int, int], said: str) -> None:
    with pytest.raises(ValueError, match=f"{said} must be between"):
        pass_at_k(*arguments)


def test_one_attempt_per_prompt_counts_prompts() -> None:
    assert rate_over_prompts([1.0, 0.0, 1.0, 1.0], trials=1) == Rate(3.0, 4)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_attempts_that_all_agree_count_as_one_per_prompt(share: float) -> None:
    assert rate_over_prompts([share] * 5, trials=8) == Rate(5 * share, 5)


@given(st.lists(st.integers(0, 8), min_size=1, max_size=40))
def test_the_count_lies_between_prompts_and_attempts_and_the_mean_is_kept(passes: list[int]) -> None:
    shares = [count / 8 for count in passes]
    rate = rate_over_prompts(shares, trials=8)
    assert len(shares) <= rate.count <= 8 * len(shares) and rate.count == int(rate.count)
    assert rate.result() == pytest.approx(sum(shares) / len(shares), abs=1e-12)


@pytest.mark.parametrize(("a", "b"), [(0.3, 0.3), (0.5, 2.0), (2.0, 2.0), (50.0, 50.0)])
def test_the_interval_covers_the_true_rate_however_much_prompts_differ(a: float, b: float) -> None:
    """Counting every attempt as independent covers as little as 60%; prompts alone, 98% and more, twice as wide."""
    random = np.random.default_rng(0)
    chances = random.beta(a, b, (1500, 24))
    shares = random.binomial(8, chances) / 8
    intervals = [rate_over_prompts(row, trials=8).interval() for row in shares.tolist()]
    covered = np.mean([low <= a / (a + b) <= high for low, high in intervals])
    assert 0.93 <= covered <= 0.985, covered


def test_the_rows_of_an_evaluation_hold_every_measure_as_json_can() -> None:
    measures = {"pass_rate": Rate(3, 4), "pass_at/2": Rate(2, 2), "entropy_estimate": Mean(0, 0)}
    (row,) = eval_rows([HeldOut("gym/sums", "new", measures)])
    low, high = Rate(3, 4).interval()
    assert row == {
        **{"environment": "gym/sums", "split": "new", "rate": 0.75, "low": low, "high": high, "n": 4},
        **{"pass_at/2": 1.0, "entropy_estimate": None},
    }
