"""Guards on a ratio: each kind against its formula, what loses its gradient, what is refused."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_rl.loss.guard import EDGES, GUARD_KINDS, NoiseTable, apply_guard, bin_numbers
from megatron_rl.loss.ratio_streams import Ratios, by_bin

DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
TABLE = NoiseTable(
    shrink=(0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 1.0),
    lower=(-0.7, -0.6, -0.5, -0.4, -0.3, -0.2, 0.0),
    upper=(0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.0),
)
LOW, HIGH = 0.5, 2.0
ENDS: dict[str, dict[str, Any]] = {
    "off": {},
    "tis": {"high": HIGH},
    "clip": {"low": LOW, "high": HIGH},
    "reject": {"low": LOW, "high": HIGH},
    "clamp": {"low": LOW, "high": HIGH},
    "shrink": {"table": TABLE},
    "derived": {"table": TABLE},
}


def by_hand(kind: str, log_ratio: float, confidence: float) -> tuple[float, bool]:
    """(weight, whether it has a gradient), one token at a time in ratio space."""
    log_ratio = max(-20.0, min(20.0, log_ratio))
    ratio = math.exp(log_ratio)
    number = max(n for n in range(7) if n == 0 or EDGES[n] <= confidence)
    inside = LOW <= ratio <= HIGH
    return {
        "off": (ratio, True),
        "tis": (min(ratio, HIGH), True),
        "clip": (min(max(ratio, LOW), HIGH), inside),
        "reject": (ratio if inside else 0.0, inside),
        "clamp": (min(max(ratio, LOW), HIGH), True),
        "shrink": (ratio ** TABLE.shrink[number], True),
        "derived": (min(max(ratio, math.exp(TABLE.lower[number])), math.exp(TABLE.upper[number])), True),
    }[kind]


@DTYPES
@pytest.mark.parametrize("kind", GUARD_KINDS)
@settings(max_examples=30)
@given(st.lists(st.tuples(st.floats(-40, 40), st.floats(0, 1)), max_size=30))
def test_every_kind_weighs_tokens_as_its_formula_says(
    kind: str, dtype: torch.dtype, tokens: list[tuple[float, float]]
) -> None:
    log_ratio = torch.tensor([ratio for ratio, _ in tokens], dtype=dtype)
    confidence = torch.tensor([p for _, p in tokens], dtype=dtype)
    guarded = apply_guard(log_ratio, confidence, kind=kind, **ENDS[kind])
    exact = [by_hand(kind, *token) for token in zip(log_ratio.tolist(), confidence.tolist(), strict=True)]
    on_the_edge = [abs(abs(ratio) - math.log(2)) < 1e-6 for ratio in log_ratio.tolist()]
    for weight, passes, (want, wants_gradient), edge in zip(
        guarded.log_weight.exp().tolist(), guarded.passes.tolist(), exact, on_the_edge, strict=True
    ):
        if not edge:
            assert weight == pytest.approx(want, rel=1e-5 if dtype is torch.float32 else 1e-12)
            assert passes == wants_gradient
    assert guarded.log_weight.dtype == dtype


@pytest.mark.parametrize("kind", GUARD_KINDS)
def test_no_gradient_flows_through_a_guard(kind: str) -> None:
    log_ratio = torch.tensor([-2.0, 0.1, 2.0], requires_grad=True)
    guarded = apply_guard(log_ratio, log_ratio.exp().clamp(max=1), kind=kind, **ENDS[kind])
    assert not guarded.log_weight.requires_grad and not guarded.passes.requires_grad


def test_a_lower_end_of_zero_bounds_nothing_and_ends_of_one_leave_weight_one() -> None:
    log_ratio = torch.tensor([-15.0, 0.0, 15.0])
    open_below = apply_guard(log_ratio, log_ratio.exp().clamp(max=1), kind="clamp", low=0.0, high=1.0)
    assert open_below.log_weight.tolist() == [-15.0, 0.0, 0.0]
    closed = apply_guard(log_ratio, log_ratio.exp().clamp(max=1), kind="clip", low=1.0, high=1.0)
    assert closed.log_weight.tolist() == [0.0, 0.0, 0.0] and closed.passes.tolist() == [False, True, False]


@DTYPES
def test_a_bin_holds_its_lower_edge_and_the_last_one_both(dtype: torch.dtype) -> None:
    confidence = torch.tensor(
        [0.0, 0.05, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99, 1.0, 1.0 + 1e-7, math.nan], dtype=torch.float64
    )
    assert bin_numbers(confidence).tolist() == [0, 0, 1, 2, 3, 4, 5, 6, 6, 6, 6]
    below = torch.nextafter(confidence[2:8].to(dtype), torch.zeros(6, dtype=dtype))
    assert bin_numbers(below).tolist() == [0, 1, 2, 3, 4, 5]


@settings(max_examples=50)
@example([math.log(edge) for edge in EDGES[1:]])
@given(st.lists(st.floats(-30, 0), min_size=1, max_size=30))
def test_guards_and_measurements_sort_tokens_into_the_same_bins(logps: list[float]) -> None:
    logp = np.array(logps)
    numbers = bin_numbers(torch.from_numpy(np.exp(logp))).numpy()
    marked = Ratios(np.array(logps), logp - np.arange(len(logps)))
    for number, tokens in enumerate(by_bin(marked)):
        np.testing.assert_allclose(sorted(tokens), np.flatnonzero(numbers == number), atol=1e-9)


def test_a_table_survives_its_dictionary() -> None:
    assert NoiseTable.from_dict(TABLE.to_dict()) == TABLE


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shrink": [0.5] * 6}, "shrink must have one entry per bin: 7"),
        ({"shrink": [1.5] + [0.5] * 6}, r"shrink must be finite and in \[0.0, 1.0\], got 1.5"),
        ({"lower": [0.1] + [-0.5] * 6}, "lower must be finite and in"),
        ({"upper": [math.inf] + [0.5] * 6}, "upper must be finite"),
        ({"upper": [math.nan] + [0.5] * 6}, "upper must be finite"),
        ({"edges": [0.0, 0.3, 0.1, 0.5, 0.7, 0.9, 0.99, 1.0]}, "edges must rise from 0 to 1"),
        ({"extra": [1.0]}, "a noise table has shrink, lower, upper, edges, got"),
    ],
)
def test_a_table_that_cannot_be_is_refused(changes: dict[str, list[float]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NoiseTable.from_dict({**TABLE.to_dict(), **changes})


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("trust", {}, "guard must be one of off, tis, clip, reject, clamp, shrink, derived, got 'trust'"),
        ("tis", {}, "guard tis needs high, got None"),
        ("tis", {"low": 0.5, "high": 2.0}, "guard tis has no use for low"),
        ("clamp", {"high": 2.0}, "guard clamp needs low"),
        ("reject", {"low": 0.5}, "guard reject needs high"),
        ("clip", {"low": 1.5, "high": 2.0}, r"low must be a ratio in \[0, 1\], got 1.5"),
        ("clip", {"low": math.nan, "high": 2.0}, r"low must be a ratio in \[0, 1\], got nan"),
        ("clamp", {"low": -0.5, "high": 2.0}, "low must be a ratio"),
        ("clamp", {"low": 0.5, "high": 0.9}, "high must be a ratio of at least 1, got 0.9"),
        ("clamp", {"low": 0.5, "high": math.inf}, "high must be a ratio of at least 1, got inf"),
        ("off", {"high": 2.0}, "guard off has no use for high"),
        ("shrink", {"low": 0.5, "table": TABLE}, "guard shrink has no use for low"),
        ("shrink", {}, "guard shrink needs a noise table, got None; calibrate first"),
        ("derived", {}, "guard derived needs a noise table"),
    ],
)
def test_bad_options_are_named(kind: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        apply_guard(torch.zeros(2), torch.ones(2), kind=kind, **options)


@pytest.mark.parametrize("confidence", [torch.ones(3), torch.ones(2, 1)], ids=str)
def test_streams_must_be_aligned(confidence: Tensor) -> None:
    with pytest.raises(ValueError, match="confidence must be aligned with log_ratio"):
        apply_guard(torch.zeros(2), confidence, kind="off")
