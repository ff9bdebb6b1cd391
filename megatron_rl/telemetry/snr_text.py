"""Calibrations in words and cells: what both the terminal and the page show."""

import math
from collections.abc import Sequence

from megatron_rl.telemetry.snr_log import BinRow, RatioSummary, SnrRecord

BIN_COLUMNS = (
    "p of the token",
    "tokens, calibration",
    "tokens, live",
    "noise sd",
    "signal sd",
    "SNR",
    "lambda",
    "noise quantiles",
    "ESS allows",
    "bounds on r",
    "outside",
    "verdict",
)
"""Quantiles, what ESS allows, and bounds are shown as ratios r; standard deviations are of log r, in nats."""

_NONE = "–"


def number(value: float | None, digits: int = 4) -> str:
    """To so many significant digits; a dash where it was not measured."""
    return _NONE if value is None else f"{value:.{digits}g}"


def share(value: float | None) -> str:
    """In percent; a dash where it was not measured."""
    return _NONE if value is None else f"{value:.2%}"


def bin_name(row: BinRow) -> str:
    """Edges of the bin."""
    return f"{row.low:g}–{row.high:g}"


def bin_cells(row: BinRow, rows: Sequence[BinRow]) -> tuple[str, ...]:
    """The row's cells in the order of BIN_COLUMNS."""
    snr = _with_error(row.snr, row.snr_error)
    verdict = row.verdict or _NONE
    if row.pool is not None:
        verdict = f"{verdict}, of {_span_name(row.pool, rows)} together" if row.pool else "too few tokens"
    return (
        bin_name(row),
        str(row.tokens_cal),
        str(row.tokens_live),
        number(_root(row.var_cal), 3),
        number(_root(row.var_signal), 3),
        snr,
        number(row.shrink, 2),
        _NONE if row.noise_lower is None else ratio_span(row.noise_lower, row.noise_upper),
        ratio_span(row.guard_lower, row.guard_upper),
        ratio_span(row.lower, row.upper),
        share(row.outside),
        verdict,
    )


def summary_rows(record: SnrRecord) -> list[tuple[str, str, str]]:
    """(what, in the calibration, in the live window) over all tokens."""
    rows = [("tokens", str(record.calibration.tokens), str(record.live.tokens) if record.live else _NONE)]
    rows.append(("mean ratio, uncapped", _mean(record.calibration), _mean(record.live)))
    for what, name, shown in (
        ("mean ratio, capped at 2", "capped_mean_ratio", number),
        ("|log r|, mean", "abs_mean", number),
        ("|log r|, median", "abs_median", number),
        ("|log r|, 99%", "abs_p99", number),
        ("|log r|, largest", "abs_max", number),
        ("ESS / tokens", "ess", number),
        ("mismatch KL (k3), nats per token", "k3", number),
        ("r outside [0.5, 2]", "outside", share),
        ("of those, fork tokens", "outside_on_forks", share),
        ("of all |log r|, on fork tokens", "mass_on_forks", share),
    ):
        rows.append((what, shown(getattr(record.calibration, name)), shown(getattr(record.live, name, None))))
    return rows


def headline(record: SnrRecord) -> str:
    """Verdict over all bins."""
    if record.snr is None:
        return f"{record.verdict}: no live window to compare with yet"
    return f"{record.verdict}: SNR {_with_error(record.snr, record.snr_error)} over all bins"


def _with_error(snr: float | None, error: float | None) -> str:
    return number(snr, 3) if error is None else f"{number(snr, 3)} ± {number(error, 2)}"


def identity_line(record: SnrRecord) -> str:
    """Whether the log-probs are what they claim to be."""
    identity = record.identity
    state = "holds" if identity.ok else f"BROKEN ({identity.diagnosis})"
    lines = f"identity {state}: {identity.reason}, {share(identity.missing)} without an engine log-prob"
    return lines if identity.ok else f"{lines}; {identity.cure}"


def text_report(name: str, records: Sequence[SnrRecord]) -> str:
    """The newest calibration in full and the history of all, as plain text. ValueError: no records."""
    if not records:
        raise ValueError("a report on signal and noise needs calibrations, got none; set trainer.snr")
    newest = records[-1]
    blocks = [
        f"{name}: {len(records)} calibration{'s' if len(records) > 1 else ''}, the newest after step {newest.step} "
        f"with weights {newest.weight_version}",
        identity_line(newest),
        aligned([("", "calibration", "live"), *summary_rows(newest)]),
        aligned([BIN_COLUMNS, *(bin_cells(row, newest.rows) for row in newest.rows)]),
        f"verdict: {headline(newest)}",
    ]
    blocks += ["\n".join(f"- {line}" for line in newest.advice)] if newest.advice else []
    blocks += ["\n".join(f"note: {line}" for line in newest.notes)] if newest.notes else []
    if len(records) > 1:
        blocks.append("SNR over time\n" + aligned(_history(records)))
    return "\n\n".join(blocks)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Cells in columns of equal width, the first one to the left, numbers to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        first, *rest = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        lines.append("  ".join([row[0].ljust(len(first)), *rest]).rstrip())
    return "\n".join(lines)


def ratio_span(lower: float | None, upper: float | None) -> str:
    """Bounds of log r as ratios; a dash for a side without bound, `any` for two."""
    if lower is None and upper is None:
        return "any"
    ends = (_NONE if end is None else f"{math.exp(end):.4g}" for end in (lower, upper))
    return " … ".join(ends)


def _history(records: Sequence[SnrRecord]) -> list[tuple[str, ...]]:
    head = ("step", "identity", "all", *(bin_name(row) for row in records[-1].rows))
    return [
        head,
        *(
            (
                str(record.step),
                number(record.identity.mean_ratio, 6),
                number(record.snr, 3),
                *(number(row.snr, 3) for row in record.rows),
            )
            for record in records
        ),
    ]


def _span_name(pool: Sequence[int], rows: Sequence[BinRow]) -> str:
    return f"{rows[pool[0]].low:g}–{rows[pool[-1]].high:g}"


def _mean(summary: RatioSummary | None) -> str:
    if summary is None or summary.mean_ratio is None:
        return _NONE
    return f"{summary.mean_ratio:.5f} ± {number(summary.standard_error, 2)}"


def _root(variance: float | None) -> float | None:
    return None if variance is None else math.sqrt(variance)
