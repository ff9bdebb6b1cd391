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


def verdict_of(snr: float, error: float | None) -> str:
    """signal-dominated, mixed or noise-dominated. error: standard error of snr; None or NaN is no error.

    Signal-dominated, which lets weights be trusted, needs snr two standard errors above its threshold: heavy-tailed
    noise of which a small calibration saw too little reads as movement.
    """
    doubt = 2 * error if error is not None and math.isfinite(error) else 0.0
    if snr - doubt >= SIGNAL_SNR:
        return "signal-dominated"
    return "noise-dominated" if snr <= NOISE_SNR else "mixed"


def pooled_snr(rows: Sequence[BinRow]) -> tuple[float | None, float]:
    """(signal over noise within bins, both weighted by live tokens; its standard error).

    None where no bin measured both, or no noise.
    """
    known = [row for row in rows if row.pool is None] or rows
    known = [row for row in known if row.var_live is not None and row.var_cal is not None]
    noises = [row.tokens_live * (row.var_cal or 0.0) for row in known]
    if not sum(noises) > 0:
        return None, 0.0
    # Cut off at 0 once, not bin by bin: cuts would add up to movement where there is none.
    signal = max(sum(row.tokens_live * (row.var_live or 0.0) for row in known) - sum(noises), 0.0)
    errors = [noise * (row.snr_error or 0.0) for row, noise in zip(known, noises, strict=True)]
    return signal / sum(noises), math.hypot(*errors) / sum(noises)


def uncovered(rows: Sequence[BinRow]) -> list[BinRow]:
    """Measured bins whose movement, 2 sd_alpha, needs more than the effective sample size allows."""
    return [row for row in rows if row.pool is None and row.signal is not None and row.signal > _allowed(row)]


def _allowed(row: BinRow) -> float:
    """The narrower side of what the effective sample size allows."""
    lower, upper = row.guard_lower, row.guard_upper
    return min(math.inf if lower is None else -lower, math.inf if upper is None else upper)


def advice(identity: Identity, rows: Sequence[BinRow], verdict: str, summary: RatioSummary) -> list[str]:
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
    if verdict in _ADVICE:
        lines.append(_ADVICE[verdict])
    if summary.outside and summary.outside_on_forks is not None:
        lines.append(
            f"do not reject: r leaves [0.5, 2] for {summary.outside:.2%} of the tokens, and "
            f"{summary.outside_on_forks:.0%} of those are fork tokens"
        )
    return lines
