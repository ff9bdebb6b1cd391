"""Bounds of the importance ratio per confidence bin: by hand, by closed forms, and where tokens are few."""

import math
import runpy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.loss.bounds import derive_bounds, ess_guard, ess_share, pools
from megatron_rl.loss.snr import (
    Streams,
    measure,
)

SHARED = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("test_loss_snr.py"))))
DTYPES, EVEN, in_bin, joined = SHARED.DTYPES, SHARED.EVEN, SHARED.in_bin, SHARED.joined


@DTYPES
def test_where_noise_is_wider_than_movement_its_quantiles_are_the_bounds(dtype: type[np.floating]) -> None:
    noise, live = in_bin(0, [*EVEN, 0.5, 0.5, 0.5]), in_bin(0, [0.05, -0.05] * 300)
    cal = Streams(np.asarray(noise.policy_logp).astype(dtype), np.asarray(noise.engine_logp).astype(dtype))
    bounds = derive_bounds(live.policy_logp, live.engine_logp, cal.policy_logp, cal.engine_logp)[0]
    # 404 values: the quantile .995 lies at position 403 * .995 = 400.985, .985 of the way from .2 to .5
    assert bounds.upper == bounds.noise_upper == pytest.approx(0.2 + 0.985 * 0.3, abs=1e-6)
    # and .005 at 2.015, between -.198 and -.197
    assert bounds.lower == bounds.noise_lower == pytest.approx(-0.198 + 0.015 * 0.001, abs=1e-6)
    assert bounds.signal == 0 and bounds.pool is None


def test_where_movement_is_wider_two_deviations_of_it_are_the_bounds() -> None:
    cal, live = in_bin(0, EVEN), in_bin(0, [0.3, -0.3] * 300)
    bounds = derive_bounds(live.policy_logp, live.engine_logp, cal.policy_logp, cal.engine_logp)[0]
    var_cal = 0.001**2 * 2 * sum(n * n for n in range(1, 201)) / 400
    var_live = 0.09 * 600 / 599
    assert bounds.signal == pytest.approx(2 * math.sqrt(var_live - var_cal))
    assert (bounds.lower, bounds.upper) == pytest.approx((-bounds.signal, bounds.signal))
    assert bounds.noise_upper == pytest.approx(0.198)


def test_each_side_takes_what_is_wider_there() -> None:
    skewed = [*EVEN, *[-0.9] * 20]
    cal, live = in_bin(0, skewed), in_bin(0, [0.3, -0.3] * 300)
    bounds = derive_bounds(live.policy_logp, live.engine_logp, cal.policy_logp, cal.engine_logp)[0]
    assert bounds.lower == pytest.approx(-0.9) and bounds.upper == pytest.approx(bounds.signal)


def test_the_effective_sample_size_cuts_both() -> None:
    """Half the ratios 1, half far above: (1 + c)^2 / (2 (1 + c^2)) = .8 at c = 3."""
    cal, live = in_bin(0, EVEN), in_bin(0, [0.0, 4.0] * 300)
    bounds = derive_bounds(live.policy_logp, live.engine_logp, cal.policy_logp, cal.engine_logp)[0]
    assert bounds.signal > 3
    assert bounds.upper == bounds.guard_upper == pytest.approx(math.log(3))
    assert bounds.guard_lower == -20 and bounds.lower == pytest.approx(-bounds.signal)


@DTYPES
def test_the_guard_on_the_sample_size_equals_its_closed_forms(dtype: type[np.floating]) -> None:
    def guard(*groups: float, floor: float = 0.8) -> tuple[float, float]:
        return ess_guard(np.repeat(np.array(groups, dtype=dtype), 50), floor=floor)

    assert guard(0.0, 4.0) == pytest.approx((-20, math.log(3)))
    assert guard(0.0, -4.0) == pytest.approx((-math.log(3), 20))
    # Both sides: c and 1/c give (c^2 + 1)^2 / (2 (c^4 + 1)) = .8 at c = sqrt 3, half of what each side may have alone.
    assert guard(5.0, -5.0) == pytest.approx((-math.log(3) / 2, math.log(3) / 2))
    assert guard(0.1, -0.1) == (-20, 20), "nothing binds"
    assert guard(0.0, 4.0, floor=1.0)[1] == pytest.approx(0, abs=1e-6)


@settings(max_examples=60)
@given(st.lists(st.floats(-30, 30), min_size=1, max_size=40), st.floats(0.3, 0.99), st.floats(0, 1), st.floats(0, 1))
def test_any_bounds_inside_the_guard_keep_the_floor(
    logs: list[float], floor: float, lower_part: float, upper_part: float
) -> None:
    lower, upper = ess_guard(np.array(logs), floor=floor)
    assert -20 <= lower <= 0 <= upper <= 20
    for low, high in ((lower, upper), (lower_part * lower, upper_part * upper)):
        assert ess_share(np.clip(logs, low, high)) >= floor - 1e-6


@settings(max_examples=60)
@given(st.lists(st.floats(-10, 10), min_size=2, max_size=40), st.floats(0.3, 0.99))
def test_no_wider_bounds_keep_the_floor(logs: list[float], floor: float) -> None:
    lower, upper = ess_guard(np.array(logs), floor=floor)
    if (lower, upper) == (-20, 20):
        assert ess_share(np.array(logs)) >= floor - 1e-9
        return
    wider = 1.05
    sides = [ess_share(np.clip(logs, 0, wider * upper)), ess_share(np.clip(logs, wider * lower, 0))]
    assert min(*sides, ess_share(np.clip(logs, wider * lower, wider * upper))) <= floor + 1e-6


def test_a_thin_bin_pools_with_less_confident_ones_and_the_undecided_end_upwards() -> None:
    cal = joined(
        *(in_bin(number, [sd, -sd] * half) for number, sd, half in ((1, 0.2, 250), (3, 0.1, 250), (4, 0.05, 9)))
    )
    bounds = derive_bounds(None, None, cal.policy_logp, cal.engine_logp)
    assert [bound.pool for bound in bounds] == [(0, 1), None, (1, 2), None, (3, 4), (3, 4, 5), (3, 4, 5, 6)]
    assert [bound.upper for bound in bounds] == pytest.approx([0.2, 0.2, 0.2, 0.1, 0.1, 0.1, 0.1])
    assert bounds[2].lower == pytest.approx(-0.2), "of two neighbours the less confident one"


def test_undecided_tokens_never_get_the_bounds_of_sure_ones() -> None:
    """Few forks beside many sure tokens, as in a calibration of a policy that is mostly certain."""
    sure, forks = in_bin(6, [1e-4, -1e-4] * 4000), joined(*(in_bin(number, [0.1, -0.1] * 20) for number in range(5)))
    for live in (None, joined(sure, *(in_bin(number, [0.2, -0.2] * 2000) for number in range(5)))):
        record = measure(joined(sure, forks), live, step=1, weight_version=1)
        assert [row.pool for row in record.rows] == [[]] * 6 + [None]
        assert record.rows[6].upper == pytest.approx(1e-4)
        for row in record.rows[:6]:
            assert (row.lower, row.upper, row.shrink, row.noise_upper, row.signal) == (-20, 20, 1, None, None)
            assert not row.outside and row.verdict == ""
        (note,) = [note for note in record.notes if "too few of the" in note]
        assert note.startswith("p in 0-0.1, 0.1-0.3, 0.3-0.5, 0.5-0.7, 0.7-0.9, 0.9-0.99: too few of the 8200 ")
        assert "raise trainer.snr.prompts" in note


def test_where_only_the_sample_size_bounds_r_it_does() -> None:
    cal, live = in_bin(0, [0.1] * 10), in_bin(0, [0.0, 4.0] * 300)
    bounds = derive_bounds(live.policy_logp, live.engine_logp, cal.policy_logp, cal.engine_logp)
    assert bounds[0].pool == () and (bounds[0].lower, bounds[0].upper) == pytest.approx((-20, math.log(3)))
    alone = derive_bounds(None, None, in_bin(3, [0.1] * 10).policy_logp, in_bin(3, [0.1] * 10).engine_logp)
    assert (alone[0].lower, alone[0].upper) == (-20, 20), "no tokens at all below"


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=7, max_size=7), st.booleans())
def test_pools_have_enough_tokens_and_no_sure_ones_for_undecided_bins(
    counts: list[tuple[int, int]], moves: bool
) -> None:
    cal, live = ([np.zeros(pair[which]) for pair in counts] for which in (0, 1))
    passes = [cal, live] if moves else [cal]
    for number, pool in enumerate(pools(cal, live if moves else None, 20)):
        own = all(len(one[number]) >= 20 for one in passes)
        assert own == (pool is None)
        if pool:
            assert number in pool and all(sum(len(one[n]) for n in pool) >= 20 for one in passes)
            assert pool[-1] == number or (pool[0] == 0 and pool[-1] < 6), "upwards only from the very end"
        elif pool == ():
            highest = max(number, 5)
            assert any(sum(map(len, one[: highest + 1])) < 20 for one in passes)
