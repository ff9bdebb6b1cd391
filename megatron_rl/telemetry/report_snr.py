"""The page's section on signal and noise: tables and drawings that need no script."""

import html
import math
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_rl.telemetry.snr_log import SnrRecord, read_snr
from megatron_rl.telemetry.snr_text import (
    BIN_COLUMNS,
    bin_cells,
    bin_name,
    headline,
    identity_line,
    number,
    summary_rows,
)

LINK = '<a href="#snr">Signal or noise</a>'

_ABOUT = (
    "The log-ratio of a sampled token is policy movement plus engine noise. A calibration samples with the weights "
    "that the trainer holds, so its log-ratio is noise alone; what the live window has more of is movement. Rows are "
    "bins of the policy's probability of the token; both are largest where the policy is undecided."
)
_WIDTH, _HEIGHT = 320, 180
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 308, 10, 156
_SNR_TICKS = (0.0, 1 / 3, 1.0, 3.0, 9.0)
_COLOURS = 8


def snr_section(run_dirs: Sequence[Path], names: Sequence[str]) -> str:
    """One part for each run with calibrations; empty if there is none. DataError (file and line): a damaged record."""
    parts = []
    for folder, name in zip(run_dirs, names, strict=True):
        if records := read_snr(folder):
            parts.append((f"<h3>{html.escape(name)}</h3>" if len(names) > 1 else "") + _run_html(records))
    if not parts:
        return ""
    return f'<section id="snr">\n<h2>Signal or noise</h2>\n<p>{html.escape(_ABOUT)}</p>\n{"".join(parts)}</section>'


def _run_html(records: Sequence[SnrRecord]) -> str:
    newest = records[-1]
    lines = "".join(f"<li>{html.escape(line)}</li>" for line in newest.advice)
    notes = "".join(f'<p class="note">{html.escape(line)}</p>' for line in newest.notes)
    bins = [bin_cells(row, newest.rows) for row in newest.rows]
    verdict, identity = html.escape(headline(newest)), html.escape(identity_line(newest))
    return (
        f"<p><b>{verdict}</b>, after step {newest.step}. The {identity}.</p>"
        f"{f'<ul>{lines}</ul>' if lines else ''}"
        f'<div class="wide">{_table(BIN_COLUMNS, bins)}</div>{notes}'
        f"<details><summary>All tokens together</summary>"
        f'<div class="wide">{_table(("", "calibration", "live"), summary_rows(newest))}</div></details>'
        f'<div class="charts">{_snr_figure(records)}{"".join(_bounds_figures(records))}</div>'
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    titles = "".join(f'<th scope="col">{html.escape(title)}</th>' for title in head)
    body = "".join(
        f'<tr><th scope="row">{html.escape(first)}</th>{"".join(f"<td>{html.escape(cell)}</td>" for cell in rest)}</tr>'
        for first, *rest in rows
    )
    return f'<table class="snr"><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>'


def _snr_figure(records: Sequence[SnrRecord]) -> str:
    """SNR of every bin over steps; the axis is even in SNR / (1 + SNR), so that 0 and large values fit."""
    x = _steps_axis(records)
    y = _scale(0.0, 1.0)
    lines, legend = [], []
    for index, row in enumerate(records[-1].rows):
        points = [(x(r.step), y(_lambda(r.rows[index].snr))) for r in records if r.rows[index].snr is not None]
        colour = f"k{index % _COLOURS}"
        lines.append(f'<g class="{colour}">{_path(points)}{_dots(points)}</g>')
        name = f"{bin_name(row)} {number(row.snr, 3)}"
        legend.append(f'<span class="{colour}"><i class="swatch"></i>{html.escape(name)}</span>')
    ticks = [(y(_lambda(snr)), number(snr, 2)) for snr in _SNR_TICKS]
    about = (
        "From 3 on the ratio is mostly movement, up to 1/3 mostly noise. One line per bin of p, with its last value."
    )
    return _figure("SNR per bin", about, _svg("SNR per bin over steps", ticks, records, "".join(lines)), legend)


def _bounds_figures(records: Sequence[SnrRecord]) -> list[str]:
    """For each bin its derived bounds over steps as a band of log r, with the noise's quantiles."""
    x, figures = _steps_axis(records), []
    for index, newest in enumerate(records[-1].rows):
        rows = [record.rows[index] for record in records]
        # Bounds for want of tokens are as wide as they may be: off the drawing, or nothing else could be told apart.
        known = [row for row in rows if row.pool != []] or rows
        ends = [end for row in known for end in (row.lower, row.upper, row.noise_lower, row.noise_upper)]
        reach = max(abs(end) for end in ends if end is not None) or 1.0
        scale = _scale(-reach, reach)

        def y(end: float, scale: Callable[[float], float] = scale, reach: float = reach) -> float:
            return scale(min(max(end, -reach), reach))

        upper = [(x(record.step), y(row.upper)) for record, row in zip(records, rows, strict=True)]
        lower = [(x(record.step), y(row.lower)) for record, row in zip(records, rows, strict=True)]
        band = f'<path class="band" d="{_outline([*upper, *reversed(lower)])}Z"/>'
        quantiles = [
            (x(record.step), y(end))
            for record, row in zip(records, rows, strict=True)
            for end in (row.noise_lower, row.noise_upper)
            if end is not None
        ]
        drawn = f'<g class="k{index % _COLOURS}">{band}{_path(upper)}{_path(lower)}</g>'
        drawn += f'<g class="k6">{_dots(quantiles)}</g>'
        ticks = [(y(end), number(end, 2)) for end in (-reach, 0.0, reach)]
        title = f"Bounds of log r, p in {bin_name(newest)}"
        about = f"Now {newest.lower:.3g} to {newest.upper:.3g}. Dots: quantiles of the noise."
        figures.append(_figure(title, about, _svg(f"{title} over steps", ticks, records, drawn), []))
    return figures


def _figure(title: str, about: str, svg: str, legend: Sequence[str]) -> str:
    return (
        f"<figure><figcaption><h4>{html.escape(title)}</h4><p>{html.escape(about)}</p></figcaption>"
        f'<div class="legend">{"".join(legend)}</div><div class="plot">{svg}</div></figure>'
    )


def _svg(label: str, ticks: Sequence[tuple[float, str]], records: Sequence[SnrRecord], drawn: str) -> str:
    grid = "".join(f'<path class="grid" d="M{_LEFT} {at:.1f}H{_RIGHT}"/>' for at, _ in ticks)
    names = "".join(f'<text x="{_LEFT - 6}" y="{at + 3.5:.1f}" text-anchor="end">{name}</text>' for at, name in ticks)
    first, last = records[0].step, records[-1].step
    steps = f'<text x="{_LEFT}" y="{_HEIGHT - 8}">step {first}</text>'
    if last > first:
        steps += f'<text x="{_RIGHT}" y="{_HEIGHT - 8}" text-anchor="end">{last}</text>'
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{html.escape(label)}">{grid}{names}'
        f'<path class="axis" d="M{_LEFT} {_BOTTOM}H{_RIGHT}"/>{steps}{drawn}</svg>'
    )


def _steps_axis(records: Sequence[SnrRecord]) -> Callable[[float], float]:
    first, last = records[0].step, records[-1].step
    return lambda step: _LEFT + (_RIGHT - _LEFT) * (step - first) / max(1, last - first)


def _scale(low: float, high: float) -> Callable[[float], float]:
    return lambda value: _BOTTOM - (_BOTTOM - _TOP) * (value - low) / (high - low)


def _lambda(snr: float | None) -> float:
    return math.nan if snr is None else snr / (1 + snr)


def _outline(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def _path(points: Sequence[tuple[float, float]]) -> str:
    return f'<path class="line" d="{_outline(points)}"/>' if points else ""


def _dots(points: Sequence[tuple[float, float]]) -> str:
    return "".join(f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="2.2"/>' for x, y in points)
