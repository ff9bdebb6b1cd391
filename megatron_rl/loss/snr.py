"""Is the importance ratio signal or noise? log r = alpha (policy movement) + beta (engine noise). (SNR article 2026)

A calibration has the same weights on both sides, so its log r is beta alone; the live window has both. Per confidence
bin, since both are largest where the policy is undecided: var alpha = var live - var calibration.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_rl.loss.bounds import (
    Bounds,
    bounds_of_bins,
    derive_bounds,
    ess_share,
    signal_variance,
    tokens_of,
    variance,
)
from megatron_rl.loss.guard import EDGES, Guarded, NoiseTable, apply_guard
from megatron_rl.loss.identity import IdentityError, identity_check, mean_one, require_identity
from megatron_rl.loss.ratio_streams import Ratios, Stream, Streams, by_bin, finite, known_ratios
from megatron_rl.loss.snr_config import SnrConfig
from megatron_rl.loss.snr_verdict import advice, pooled_snr, verdict_of
from megatron_rl.loss.trust_region import MAX_LOG_RATIO
from megatron_rl.telemetry.snr_log import BinRow, RatioSummary, SnrRecord
from megatron_rl.telemetry.values import Last, Value

__all__ = [
    "EDGES",
    "Bounds",
    "Guarded",
    "IdentityError",
    "NoiseTable",
    "SnrConfig",
    "SnrRecord",
    "Streams",
    "apply_guard",
    "derive_bounds",
    "expressed_variance",
    "identity_check",
    "measure",
    "noise_table",
    "record_metrics",
    "require_identity",
    "snr_table",
]

ROUNDING_VARIANCE = 1e-14
"""Least noise variance that SNR divides by: that of a float32 log-prob of a few nats."""
BAND = (0.5, 2.0)
"""The usual static band of r, in which out-of-band tokens are counted; its end is the cap of the capped mean."""
FORKS = 0.2
"""Share of tokens, those of lowest confidence, that count as forks."""


@dataclass(frozen=True)
class BinSnr:
    """One confidence bin, from its own tokens alone; variances of log r, NaN below two tokens."""

    low: float
    high: float
    tokens_cal: int
    tokens_live: int
    var_cal: float
    var_live: float
    var_signal: float
    """max(var_live - var_cal, 0)."""
    snr: float
    """var_signal / var_cal."""
    snr_error: float
    """Standard error of var_live / var_cal from the fourth moments, tokens taken as independent: a little small."""
    shrink: float
    """lambda = snr / (1 + snr); like snr too large where nothing moves, so noise is shrunk too little rather than
    movement too much. 1, nothing to shrink by, without a live window or noise estimate."""


def snr_table(
    policy_logp: Stream | None,
    engine_logp: Stream | None,
    policy_logp_cal: Stream,
    engine_logp_cal: Stream,
    *,
    edges: Sequence[float] = EDGES,
) -> list[BinSnr]:
    """Movement and noise per confidence bin of the policy's p of the token; one row per bin.

    Streams [T]: the live window, None before the first step, and the calibration; tokens without an engine log-prob are
    left out. Movement and noise are taken as independent within a bin. The subtraction is right on average but cut off
    at 0, so a bin without movement reads up to a few snr_error above 0. ValueError: shapes that disagree, broken
    log-probs, edges that do not rise from 0 to 1.
    """
    cal = by_bin(known_ratios(policy_logp_cal, engine_logp_cal), edges)
    live = None
    if policy_logp is not None and engine_logp is not None:
        live = by_bin(known_ratios(policy_logp, engine_logp), edges)
    return _table(cal, live, edges)


def expressed_variance(sigma: float | Tensor, probs_TV: Tensor, token_ids: Tensor) -> Tensor:
    """Variance of log p of a token when every logit has independent noise of standard deviation sigma. [T]

    sigma^2 (1 - 2p + |p|^2), to first order in sigma: 0 at a certain token, near sigma^2 at an unlikely one among many.
    probs_TV: whole next-token distributions. (SNR article 2026, section 2)
    """
    taken = probs_TV.gather(-1, token_ids[:, None]).squeeze(-1)
    return torch.as_tensor(sigma) ** 2 * (1 - 2 * taken + probs_TV.square().sum(-1))


def measure(
    calibration: Streams, live: Streams | None, *, step: int, weight_version: int, config: SnrConfig | None = None
) -> SnrRecord:
    """Identity, table, bounds and verdict of one calibration.

    calibration: tokens sampled under the weights that both sides hold; its identity check is the one in the record. A
    caller that must not train on a broken ratio calls require_identity. live: the latest steps' trained tokens, None
    before the first step: lambda is 1 and the bounds are the noise's quantiles, within what the effective sample size
    allows. The live mean ratio is reported and not checked: groups were admitted by their rewards.
    IdentityError: no token of the calibration has an engine log-prob. ValueError: shapes that disagree, no tokens,
    broken log-probs.
    """
    config = config or SnrConfig()
    identity = identity_check(calibration.policy_logp, calibration.engine_logp, entropy=calibration.entropy)
    noise = known_ratios(calibration.policy_logp, calibration.engine_logp)
    if not len(noise.policy_logp):
        require_identity(identity)
    moving = None if live is None else known_ratios(live.policy_logp, live.engine_logp)
    if moving is not None and not len(moving.policy_logp):
        moving = None
    cal_bins, live_bins = by_bin(noise), None if moving is None else by_bin(moving)
    bounds = bounds_of_bins(
        cal_bins, live_bins, quantile=config.quantile, ess_floor=config.ess_floor, min_tokens=config.min_tokens
    )
    rows = _rows(cal_bins, live_bins, bounds)
    total, error = pooled_snr(rows)
    verdict = "noise only" if total is None else verdict_of(total, error)
    summary = None if moving is None else _summary(moving)
    of_noise = _summary(noise)
    return SnrRecord(
        step=step,
        weight_version=weight_version,
        identity=identity,
        calibration=of_noise,
        live=summary,
        rows=rows,
        verdict=verdict,
        snr=total,
        snr_error=None if total is None else error,
        advice=advice(identity, rows, verdict, summary or of_noise),
        notes=_notes(rows, config, has_live=moving is not None, tokens=of_noise.tokens),
        quantile=config.quantile,
        ess_floor=config.ess_floor,
    )


def noise_table(record: SnrRecord) -> NoiseTable:
    """What the guards shrink and derived read."""
    rows = record.rows
    return NoiseTable(
        shrink=tuple(row.shrink for row in rows),
        lower=tuple(row.lower for row in rows),
        upper=tuple(row.upper for row in rows),
        edges=(*(row.low for row in rows), rows[-1].high),
    )


def record_metrics(record: SnrRecord) -> dict[str, Value]:
    """The calibration's curves, named snr/*; equal on every rank. Names that were not measured are left out."""
    numbers: dict[str, float | None] = {
        "snr/identity": record.identity.mean_ratio,
        "snr/total": record.snr,
        "snr/mismatch_kl": record.calibration.k3,
        "snr/outside_on_forks": (record.live or record.calibration).outside_on_forks,
    }
    for row in record.rows:
        name = f"{row.low:g}-{row.high:g}"
        numbers[f"snr/bin/{name}"] = row.snr
        numbers[f"snr/noise/{name}"] = None if row.var_cal is None else math.sqrt(row.var_cal)
    return {name: Last(number) for name, number in numbers.items() if number is not None}


def _table(cal: Sequence[np.ndarray], live: Sequence[np.ndarray] | None, edges: Sequence[float]) -> list[BinSnr]:
    return [
        _bin_snr(edges[number], edges[number + 1], noise, np.empty(0) if live is None else live[number])
        for number, noise in enumerate(cal)
    ]


def _bin_snr(low: float, high: float, noise: np.ndarray, live: np.ndarray) -> BinSnr:
    var_cal, var_live = variance(noise), variance(live)
    signal, floor = signal_variance(noise, live), max(var_cal, ROUNDING_VARIANCE)
    snr = signal / floor
    error = var_live / floor * math.hypot(_relative_error(noise), _relative_error(live))
    shrink = 1.0 if math.isnan(snr) else snr / (1 + snr)
    return BinSnr(low, high, len(noise), len(live), var_cal, var_live, signal, snr, error, shrink)


def _relative_error(log_ratio: np.ndarray) -> float:
    """Standard error of the variance over the variance; NaN below two tokens, 0 without variance."""
    if len(log_ratio) < 2:
        return math.nan
    squares = np.square(log_ratio - log_ratio.mean())
    return float(squares.std() / (squares.mean() * math.sqrt(len(squares)))) if squares.any() else 0.0


def _rows(cal: Sequence[np.ndarray], live: Sequence[np.ndarray] | None, bounds: Sequence[Bounds]) -> list[BinRow]:
    own = _table(cal, live, EDGES)
    rows = []
    for number, (row, bound) in enumerate(zip(own, bounds, strict=True)):
        giver = row if bound.pool is None else _of_pool(bound.pool, cal, live)
        seen = cal[number] if live is None else live[number]
        outside = ((seen < bound.lower) | (seen > bound.upper)).mean() if len(seen) else math.nan
        rows.append(
            BinRow(
                low=row.low,
                high=row.high,
                tokens_cal=row.tokens_cal,
                tokens_live=row.tokens_live,
                var_cal=finite(row.var_cal),
                var_live=finite(row.var_live),
                var_signal=finite(row.var_signal),
                snr=finite(row.snr),
                snr_error=finite(row.snr_error),
                shrink=1.0 if giver is None else giver.shrink,
                noise_lower=finite(bound.noise_lower),
                noise_upper=finite(bound.noise_upper),
                signal=None if live is None or giver is None else bound.signal,
                guard_lower=bound.guard_lower if bound.guard_lower > -MAX_LOG_RATIO else None,
                guard_upper=bound.guard_upper if bound.guard_upper < MAX_LOG_RATIO else None,
                lower=bound.lower,
                upper=bound.upper,
                pool=None if bound.pool is None else list(bound.pool),
                outside=finite(float(outside)),
                verdict="" if giver is None or math.isnan(giver.snr) else verdict_of(giver.snr, giver.snr_error),
            )
        )
    return rows


def _of_pool(pool: Sequence[int], cal: Sequence[np.ndarray], live: Sequence[np.ndarray] | None) -> BinSnr | None:
    if not pool:
        return None
    noise, moving = tokens_of(pool, cal), np.empty(0) if live is None else tokens_of(pool, live)
    return _bin_snr(EDGES[pool[0]], EDGES[pool[-1] + 1], noise, moving)


def _summary(ratios: Ratios) -> RatioSummary:
    log_ratio = ratios.log_ratio
    distance, mean = np.abs(log_ratio), mean_one(log_ratio)
    ratio = np.exp(np.minimum(log_ratio, 700.0))
    outside = (ratio < BAND[0]) | (ratio > BAND[1])
    forks = np.zeros(len(log_ratio), dtype=bool)
    forks[np.argsort(ratios.policy_logp, kind="stable")[: math.ceil(FORKS * len(forks))]] = True
    return RatioSummary(
        tokens=len(log_ratio),
        mean_ratio=finite(mean.mean),
        standard_error=finite(mean.error),
        capped_mean_ratio=finite(float(np.minimum(ratio, BAND[1]).mean())),
        abs_mean=finite(float(distance.mean())),
        abs_median=finite(float(np.median(distance))),
        abs_p99=finite(float(np.quantile(distance, 0.99))),
        abs_max=finite(float(distance.max())),
        ess=finite(ess_share(log_ratio)),
        k3=finite(float((ratio - 1 - log_ratio).mean())),
        outside=float(outside.mean()),
        outside_on_forks=float(forks[outside].mean()) if outside.any() else None,
        mass_on_forks=float(distance[forks].sum() / distance.sum()) if distance.any() else None,
    )


def _notes(rows: Sequence[BinRow], config: SnrConfig, *, has_live: bool, tokens: int) -> list[str]:
    notes = []
    if not has_live:
        notes.append("no live window yet: lambda is 1 and the bounds are the noise's quantiles alone")
    if alone := [f"{row.low:g}-{row.high:g}" for row in rows if row.pool == []]:
        notes.append(
            f"p in {', '.join(alone)}: too few of the {tokens} calibration tokens, even with the bins beside "
            f"({config.min_tokens} are needed): lambda is 1 and only the effective sample size bounds r; raise "
            "trainer.snr.prompts"
        )
    for row in rows:
        if row.pool:
            notes.append(
                f"p in {row.low:g}-{row.high:g} has {row.tokens_cal} calibration and {row.tokens_live} live tokens, "
                f"fewer than {config.min_tokens}: lambda and bounds are those of "
                f"{rows[row.pool[0]].low:g}-{rows[row.pool[-1]].high:g} together"
            )
    return notes
