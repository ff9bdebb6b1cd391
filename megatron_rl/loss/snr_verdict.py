"""What a measured signal-to-noise ratio licenses, in words. (SNR article 2026, section 4)

lambda = SNR / (1 + SNR) is the share of the variance of log r that is policy movement.

| lambda | verdict | the ratio as a weight | its tails |
|---|---|---|---|
| from 0.75 (SNR 3) | signal-dominated | trusted | clamped, never deleted |
| between | mixed | shrunk, or clamped on two sides | clamped, never deleted |
| to 0.25 (SNR 1/3) | noise-dominated | not trusted: factored, or shrunk to nearly 1 | clamped outside the noise |
"""

import math
from collections.abc import Sequence

from megatron_rl.telemetry.snr_log import BinRow, Identity, RatioSummary

SIGNAL_SNR = 3.0
"""SNR from which the ratio is signal-dominated: lambda 0.75."""
NOISE_SNR = 1 / 3
"""SNR up to which it is noise-dominated: lambda 0.25."""

_ADVICE = {
    "signal-dominated": "the ratio is mostly policy movement: its weights can be trusted; loss.guard.kind derived "
    "clamps its tails",
    "mixed": "movement and noise are of one size: loss.guard.kind derived or shrink, which are two-sided; do not cap "
    "one side alone",
    "noise-dominated": "the ratio is mostly engine noise: do not let it weight tokens; set loss.proximal with its "
    "guard derived or shrink, and bring engine and trainer closer (dtype, float32 head)",
}


def verdict_of(snr: float) -> str:
    """signal-dominated, mixed or noise-dominated."""
    if snr >= SIGNAL_SNR:
        return "signal-dominated"
    return "noise-dominated" if snr <= NOISE_SNR else "mixed"


def pooled_snr(rows: Sequence[BinRow]) -> float | None:
    """Signal over noise within bins, both weighted by live tokens; None where no bin measured both, or no noise."""
    measured = [(row.tokens_live, row.var_signal, row.var_cal) for row in rows if row.pool is None]
    if not measured:
        measured = [(row.tokens_live, row.var_signal, row.var_cal) for row in rows]
    known = [(n, signal, noise) for n, signal, noise in measured if signal is not None and noise is not None]
    signal, noise = sum(n * signal for n, signal, _ in known), sum(n * noise for n, _, noise in known)
    return signal / noise if noise > 0 else None


def uncovered(rows: Sequence[BinRow]) -> list[BinRow]:
    """Measured bins whose movement, 2 sd_alpha, needs more than the effective sample size allows."""
    return [row for row in rows if row.pool is None and row.signal is not None and row.signal > _allowed(row)]


def _allowed(row: BinRow) -> float:
    """The narrower side of what the effective sample size allows."""
    lower, upper = row.guard_lower, row.guard_upper
    return min(math.inf if lower is None else -lower, math.inf if upper is None else upper)


def advice(identity: Identity, rows: Sequence[BinRow], snr: float | None, summary: RatioSummary) -> list[str]:
    """What to do, most urgent first; summary is of the pass that rejection would act on."""
    lines = []
    if not identity.ok:
        lines.append(f"stop: the calibration shows {identity.reason}; {identity.cure}")
    if wide := uncovered(rows):
        bins = ", ".join(f"{row.low:g}-{row.high:g}" for row in wide)
        lines.append(
            f"lower the staleness or factor the ratio (loss.proximal): for p in {bins} the movement needs wider bounds "
            "than the effective sample size allows"
        )
    if snr is not None:
        lines.append(_ADVICE[verdict_of(snr)])
    if summary.outside and summary.outside_on_forks is not None:
        lines.append(
            f"do not reject: r leaves [0.5, 2] for {summary.outside:.2%} of the tokens, and "
            f"{summary.outside_on_forks:.0%} of those are fork tokens"
        )
    return lines
