"""Bounds on the importance ratio that follow from measured noise, measured movement and the weights' variance."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_rl.loss.guard import EDGES, MAX_LOG_RATIO
from megatron_rl.loss.ratio_streams import Stream, as_array, by_bin, known_ratios

_HALVINGS = 60
"""Of an interval of 20 nats: beyond the precision of float64."""


@dataclass(frozen=True)
class Bounds:
    """Of log r in one confidence bin, and where they come from."""

    lower: float
    upper: float
    noise_lower: float
    noise_upper: float
    """Quantiles of the calibration's log r; NaN where they are not known."""
    signal: float
    """2 sd_alpha; 0 without a live window."""
    guard_lower: float
    guard_upper: float
    """Of ess_guard, over the live log r (without a live window: the calibration's); +- 20 where it does not bind."""
    pool: tuple[int, ...] | None
    """The bins whose tokens together gave these, this one's being too few; None: its own alone. (): no bins near it
    have enough, only the effective sample size bounds r, and the noise's quantiles are NaN."""


def ess_share(log_weights: Stream) -> float:
    """(sum w)^2 / (N sum w^2) in (0, 1]: effective sample size over sample size; NaN without tokens. (Kish 1965)"""
    logs = as_array(log_weights)
    if not len(logs):
        return float("nan")
    weights = np.exp(logs - logs.max())
    return float(weights.sum() ** 2 / (len(weights) * np.square(weights).sum()))


def ess_guard(log_ratio: Stream, *, floor: float = 0.8) -> tuple[float, float]:
    """(lower <= 0 <= upper): the widest bounds whose clamped weights keep ESS/N >= floor. In nats of log r

    upper: the largest u with ESS/N >= floor for the weights min(max(r, 1), e^u), so for the upper side alone; lower
    likewise for max(min(r, 1), e^l). Each ESS falls as its bound widens (d ESS/dc has the sign of sum w (w - c)) and is
    N at the bound 0. If the weights clamped on both sides then miss the floor, both bounds are drawn in by the largest
    factor below 1 that keeps it. So ESS/N >= floor holds for these bounds and any tighter ones. +-20 where nothing
    binds, since log r is clamped there. ValueError: no tokens, floor not in (0, 1].
    """
    if not 0 < floor <= 1:
        raise ValueError(f"the floor of ESS/N must be in (0, 1], got {floor}; 0.8 is the default")
    logs = as_array(log_ratio)
    if not len(logs):
        raise ValueError("a bound on the effective sample size needs tokens, got none; calibrate with more prompts")
    weights = _ClampedWeights(logs)
    upper = _widest(lambda u: weights.ess_share(0.0, u) >= floor)
    lower = -_widest(lambda u: weights.ess_share(-u, 0.0) >= floor)
    factor = _widest(lambda t: weights.ess_share(t * lower, t * upper) >= floor, largest=1.0)
    return factor * lower, factor * upper


def derive_bounds(
    policy_logp: Stream | None,
    engine_logp: Stream | None,
    policy_logp_cal: Stream,
    engine_logp_cal: Stream,
    *,
    edges: Sequence[float] = EDGES,
    quantile: float = 0.995,
    ess_floor: float = 0.8,
    min_tokens: int = 400,
) -> list[Bounds]:
    """Per confidence bin, in log space:

        upper = min(max(noise quantile, 2 sd_alpha), guard_upper)
        lower = max(min(noise quantile of 1 - quantile, -2 sd_alpha), guard_lower)

    outside the noise's bulk, wide enough for the movement, and no wider than the effective sample size allows.
    Streams [T]: the live window, None before the first step (sd_alpha is 0 then), and the calibration. Tokens without
    an engine log-prob are left out. A bin with fewer than min_tokens in either pass shares its neighbours' tokens,
    see pools; where these are not enough either, it has guard_lower and guard_upper alone.
    ValueError: shapes that disagree, broken log-probs, a calibration without tokens. (SNR article 2026, section 4)
    """
    cal = by_bin(known_ratios(policy_logp_cal, engine_logp_cal), edges)
    live = None
    if policy_logp is not None and engine_logp is not None:
        live = by_bin(known_ratios(policy_logp, engine_logp), edges)
    return bounds_of_bins(cal, live, quantile=quantile, ess_floor=ess_floor, min_tokens=min_tokens)


def bounds_of_bins(
    cal: Sequence[np.ndarray],
    live: Sequence[np.ndarray] | None,
    *,
    quantile: float,
    ess_floor: float,
    min_tokens: int,
) -> list[Bounds]:
    """derive_bounds from log r per bin."""
    if not sum(map(len, cal)):
        raise ValueError(
            "bounds need calibration tokens with an engine log-prob, got none; calibrate with more prompts"
        )
    found: list[Bounds] = []
    for number, pool in enumerate(pools(cal, live, min_tokens)):
        if pool == ():
            found.append(_guard_alone(tokens_of(range(number + 1), cal if live is None else live), ess_floor))
            continue
        bins = (number,) if pool is None else pool
        movement = None if live is None else tokens_of(bins, live)
        bounds = _bounds(tokens_of(bins, cal), movement, quantile=quantile, ess_floor=ess_floor)
        found.append(replace(bounds, pool=pool))
    return found


def tokens_of(bins: Iterable[int], one_pass: Sequence[np.ndarray]) -> np.ndarray:
    """log r of these bins' tokens, one bin after the other."""
    return np.concatenate([one_pass[number] for number in bins])


def pools(
    cal: Sequence[np.ndarray], live: Sequence[np.ndarray] | None, min_tokens: int
) -> list[tuple[int, ...] | None]:
    """For each bin None if it has min_tokens in both passes, else the bins that share their tokens for its numbers.

    Noise and movement grow with doubt, so the numbers of a more confident bin would cut an undecided one's ratios to
    nothing. A thin bin therefore takes in less confident bins, the nearest first, until the pool has min_tokens in both
    passes. If even all of those are too few, which is so at the undecided end, the pool grows from the first bin
    upwards, but never into the last, whose tokens have next to no noise. (): too few all the same.
    """
    passes = [cal] if live is None else [cal, live]

    def enough(low: int, high: int) -> bool:
        return all(sum(map(len, one[low : high + 1])) >= min_tokens for one in passes)

    def pool(number: int) -> tuple[int, ...] | None:
        if enough(number, number):
            return None
        down = ((low, number) for low in range(number - 1, -1, -1))
        up = ((0, high) for high in range(number + 1, len(cal) - 1))
        for low, high in (*down, *up):
            if enough(low, high):
                return tuple(range(low, high + 1))
        return ()

    return [pool(number) for number in range(len(cal))]


def signal_variance(noise: np.ndarray, live: np.ndarray) -> float:
    """max(var live - var noise, 0), movement taken as independent of noise within a bin; NaN below two tokens each."""
    return float(np.maximum(variance(live) - variance(noise), 0.0))


def variance(log_ratio: np.ndarray) -> float:
    """Unbiased; NaN below two tokens."""
    return float(log_ratio.var(ddof=1)) if len(log_ratio) > 1 else float("nan")


def _bounds(noise: np.ndarray, live: np.ndarray | None, *, quantile: float, ess_floor: float) -> Bounds:
    moving = np.empty(0) if live is None else live
    signal = 2 * signal_variance(noise, moving) ** 0.5 if min(len(noise), len(moving)) > 1 else 0.0
    noise_lower, noise_upper = (float(edge) for edge in np.quantile(noise, [1 - quantile, quantile]))
    guard_lower, guard_upper = ess_guard(moving if len(moving) else noise, floor=ess_floor)
    return Bounds(
        lower=max(min(noise_lower, -signal), guard_lower),
        upper=min(max(noise_upper, signal), guard_upper),
        noise_lower=noise_lower,
        noise_upper=noise_upper,
        signal=signal,
        guard_lower=guard_lower,
        guard_upper=guard_upper,
        pool=None,
    )


def _guard_alone(log_ratio: np.ndarray, ess_floor: float) -> Bounds:
    """What the effective sample size of these tokens allows, and no less: noise and movement are not known."""
    lower, upper = ess_guard(log_ratio, floor=ess_floor) if len(log_ratio) else (-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return Bounds(
        lower=lower,
        upper=upper,
        noise_lower=math.nan,
        noise_upper=math.nan,
        signal=0.0,
        guard_lower=lower,
        guard_upper=upper,
        pool=(),
    )


def _widest(keeps: Callable[[float], bool], *, largest: float = MAX_LOG_RATIO) -> float:
    """The largest number in [0, largest] for which keeps holds, if it holds from 0 up to somewhere; by bisection."""
    if keeps(largest):
        return largest
    low, high = 0.0, largest
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if keeps(middle) else (low, middle)
    return low


class _ClampedWeights:
    """ESS/N of r clamped to any bounds, in time log N: sorted once, with running sums of r and r^2."""

    def __init__(self, log_ratio: np.ndarray) -> None:
        self._logs = np.sort(log_ratio.clip(-MAX_LOG_RATIO, MAX_LOG_RATIO))
        weights = np.exp(self._logs)
        self._sums = np.concatenate([[0.0], weights.cumsum()])
        self._squares = np.concatenate([[0.0], np.square(weights).cumsum()])

    def ess_share(self, lower: float, upper: float) -> float:
        below, not_above = np.searchsorted(self._logs, (lower, upper), side="right")
        above = len(self._logs) - not_above
        low, high = np.exp((lower, upper))
        total = below * low + self._sums[not_above] - self._sums[below] + above * high
        squares = below * low**2 + self._squares[not_above] - self._squares[below] + above * high**2
        return float(total**2 / (len(self._logs) * squares))
