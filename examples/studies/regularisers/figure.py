"""The study's figure as SVG, written by hand: rows are training metrics, columns are groups of settings."""

import html
import math
import statistics
from collections.abc import Mapping, Sequence

from results import CURVES, RunResult
from settings import COLUMNS, SETTINGS

_COLOURS = ("#55554f", "#0072b2", "#c4510a", "#00795a", "#a8447f")
"""By place in the column; the first one is the run without regulariser."""
_PANEL_W, _PANEL_H = 250, 120
_LEFT, _TOP, _GAP_X, _GAP_Y, _LEGEND_H = 50, 58, 40, 46, 18
_TICKS = 4

Curve = list[tuple[int, float, float, float]]
"""(step, mean over seeds, least, greatest)"""


def figure_svg(results: Mapping[str, Sequence[RunResult]]) -> str:
    """Mean over seeds as a line, least to greatest as a band; a row shares its vertical axis."""
    curves = {title: _curves_of(results, title) for title in CURVES}
    rows = {title: of_setting for title, of_setting in curves.items() if of_setting}
    longest = max(map(len, COLUMNS.values()))
    width = _LEFT + len(COLUMNS) * (_PANEL_W + _GAP_X)
    height = _TOP + len(rows) * (_PANEL_H + _GAP_Y) + longest * _LEGEND_H + 24
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="12" fill="#1d1d1b">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    last_step = max((curve[-1][0] for row in rows.values() for curve in row.values()), default=1)
    for column, (title, settings) in enumerate(COLUMNS.items()):
        x = _LEFT + column * (_PANEL_W + _GAP_X)
        parts.append(_text(x, _TOP - 34, title, weight="bold"))
        for row, (measure, of_setting) in enumerate(rows.items()):
            y = _TOP + row * (_PANEL_H + _GAP_Y)
            shown = {setting: of_setting[setting] for setting in settings if setting in of_setting}
            parts += _panel(x, y, shown, settings, top=_top_of(of_setting), last_step=last_step)
            parts.append(_text(x, y - 10, measure, colour="#6a6860"))
        parts += _legend(x, _TOP + len(rows) * (_PANEL_H + _GAP_Y) + 18, settings)
    return "\n".join([*parts, "</svg>", ""])


def _curves_of(results: Mapping[str, Sequence[RunResult]], title: str) -> dict[str, Curve]:
    """By setting, over the steps that every seed has."""
    found = {}
    for setting, runs in results.items():
        of_seed = [dict(run.curves[title]) for run in runs if title in run.curves]
        steps = sorted(set.intersection(*map(set, of_seed))) if of_seed else []
        if steps:
            values = [(step, [curve[step] for curve in of_seed]) for step in steps]
            found[setting] = [(step, statistics.fmean(v), min(v), max(v)) for step, v in values]
    return found


def _top_of(of_setting: Mapping[str, Curve]) -> float:
    """Upper end of the axis, which starts at 0: the greatest value, rounded up to one digit."""
    greatest = max(high for curve in of_setting.values() for _, _, _, high in curve)
    if greatest <= 0:
        return 1.0
    unit = 10.0 ** math.floor(math.log10(greatest))
    return unit * next(factor for factor in (1, 1.5, 2, 3, 4, 5, 6, 8, 10) if greatest <= unit * factor)


def _panel(
    x: float, y: float, curves: Mapping[str, Curve], settings: Sequence[str], *, top: float, last_step: int
) -> list[str]:
    def at(step: float, value: float) -> str:
        share = min(max(value / top, 0.0), 1.0)
        return f"{x + _PANEL_W * step / last_step:.1f} {y + _PANEL_H * (1 - share):.1f}"

    parts = []
    for tick in range(_TICKS + 1):
        value = top * tick / _TICKS
        height = y + _PANEL_H * (1 - tick / _TICKS)
        parts.append(f'<path d="M{x} {height:.1f}h{_PANEL_W}" stroke="#dedbd2" fill="none"/>')
        parts.append(_text(x - 6, height + 4, f"{value:.3g}", anchor="end", colour="#6a6860", size=10))
    parts.append(_text(x, y + _PANEL_H + 13, "0", colour="#6a6860", size=10))
    parts.append(_text(x + _PANEL_W, y + _PANEL_H + 13, f"step {last_step}", anchor="end", colour="#6a6860", size=10))
    for setting, curve in curves.items():
        colour = _COLOURS[list(settings).index(setting)]
        band = [at(step, high) for step, _, _, high in curve] + [at(step, low) for step, _, low, _ in reversed(curve)]
        line = [at(step, mean) for step, mean, _, _ in curve]
        parts.append(f'<path d="M{"L".join(band)}Z" fill="{colour}" fill-opacity="0.12"/>')
        parts.append(f'<path d="M{"L".join(line)}" stroke="{colour}" stroke-width="1.6" fill="none"/>')
    return parts


def _legend(x: float, y: float, settings: Sequence[str]) -> list[str]:
    parts = []
    for number, setting in enumerate(settings):
        height = y + number * _LEGEND_H
        colour = _COLOURS[number]
        parts.append(f'<path d="M{x} {height - 4}h18" stroke="{colour}" stroke-width="3" fill="none"/>')
        parts.append(_text(x + 24, height, SETTINGS[setting].label))
    return parts


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", weight: str = "normal", colour: str = "", size: int = 0
) -> str:
    options = (f' fill="{colour}"' if colour else "") + (f' font-size="{size}"' if size else "")
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}"{options}>'
        f"{html.escape(text)}</text>"
    )
