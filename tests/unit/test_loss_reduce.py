"""Reductions: by what tokens are weighed and a step is divided."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.loss.reduce import reduction_weights

COUNTS = st.lists(st.integers(0, 50), max_size=8)


def shares(counts: list[int], weights: list[float], denominator: float) -> list[float]:
    """What each rollout's tokens add up to if every token's loss is 1."""
    return [weight * count / denominator for weight, count in zip(weights, counts, strict=True)]


@given(counts=COUNTS)
def test_token_mean_gives_every_token_the_same_share_and_all_together_one(counts: list[int]) -> None:
    weights, denominator = reduction_weights(counts, kind="token_mean")
    assert weights == [1.0] * len(counts) and denominator == max(1, sum(counts))
    assert sum(shares(counts, weights, denominator)) == pytest.approx(float(sum(counts) > 0))


@given(counts=COUNTS)
def test_sequence_mean_gives_every_rollout_with_tokens_the_same_share(counts: list[int]) -> None:
    weights, denominator = reduction_weights(counts, kind="sequence_mean")
    of_each = shares(counts, weights, denominator)
    alive = sum(count > 0 for count in counts)
    assert of_each == pytest.approx([1 / alive if count else 0.0 for count in counts])


@given(counts=COUNTS, length=st.integers(1, 100))
def test_fixed_length_divides_by_a_length_that_the_step_does_not_choose(counts: list[int], length: int) -> None:
    """A token counts the same whether its rollout and the others are long or short."""
    weights, denominator = reduction_weights(counts, kind="fixed_length", fixed_length=length)
    alive = max(1, sum(count > 0 for count in counts))
    assert weights == [1.0] * len(counts) and denominator == alive * length


@pytest.mark.parametrize("kind", ["token_mean", "sequence_mean", "fixed_length"])
@pytest.mark.parametrize("counts", [[], [0], [0, 0]])
def test_a_step_without_tokens_is_divided_by_something(kind: str, counts: list[int]) -> None:
    length = 1 if kind == "fixed_length" else None
    weights, denominator = reduction_weights(counts, kind=kind, fixed_length=length)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    assert denominator == 1 and all(weight <= 1 for weight in weights)


def test_bad_arguments_are_refused_with_their_value() -> None:
    with pytest.raises(ValueError, match="at least 0 trained tokens, got -2"):
        reduction_weights([3, -2], kind="token_mean")
    with pytest.raises(ValueError, match="reduction must be token_mean, sequence_mean or fixed_length, got 'mean'"):
        reduction_weights([3], kind="mean")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    bad = [("fixed_length", length) for length in (None, 0, math.nan, math.inf)]
    for kind, length in (*bad, ("token_mean", 5)):
        with pytest.raises(ValueError, match=f"fixed_length must be above 0 and finite .*, got {length} for {kind}"):
            reduction_weights([3], kind=kind, fixed_length=length)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
