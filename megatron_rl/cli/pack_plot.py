"""The plot of megatron-rl pack as SVG: what sequences cost, and what share of the time ranks work."""

import html
import math

import numpy as np

from megatron_rl.data.pack_forecast import AS_PACKED, Forecast

_WIDTH, _LEFT, _PANEL_W, _PANEL_H = 760, 56, 660, 170
_BAR_H, _BAR_LEFT = 24, 210
_GREY, _LINE, _BLUE, _ORANGE = "#6a6860", "#dedbd2", "#0072b2", "#c4510a"
_POINTS = 200
_TICKS = 4


def plot_svg(result: Forecast, title: str) -> str:
    """Two panels: costs of the packed sequences from the cheapest to the dearest, and throughput of every order."""
    bars_top = 84 + _PANEL_H + 78
    height = bars_top + len(result.throughput) * _BAR_H + 24
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="12" fill="#1d1d1b" role="img">',
        f"<title>{html.escape(title)}</title>",
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
        _text(_LEFT, 26, title, size=14),
        _text(_LEFT, 62, "cost of a packed sequence, over the mean", colour=_GREY),
        *_cost_curve(result.costs, 84),
        _text(_LEFT, bars_top - 14, "throughput, of what ranks of equal cost would reach", colour=_GREY),
    ]
    for row, (order, share) in enumerate(result.throughput.items()):
        parts += _bar(bars_top + row * _BAR_H, order, share)
    return "\n".join([*parts, "</svg>", ""])


def _cost_curve(costs: np.ndarray, top: float) -> list[str]:
    """costs are sorted. The axis is logarithmic: a few documents decide about everyone's time."""
    least, most = (math.floor(math.log2(costs[0])), math.ceil(math.log2(costs[-1])))
    most = max(most, least + 1)

    def height(value: float) -> float:
        return top + _PANEL_H * (most - math.log2(value)) / (most - least)

    parts = []
    step = -(-(most - least) // 8)
    for power in range(least, most + 1, step):
        y = height(2.0**power)
        parts.append(f'<path d="M{_LEFT} {y:.1f}h{_PANEL_W}" stroke="{_LINE}" fill="none"/>')
        parts.append(_text(_LEFT - 6, y + 4, f"{2.0**power:g}", anchor="end", colour=_GREY, size=10))
    for tick in range(_TICKS + 1):
        x = _LEFT + _PANEL_W * tick / _TICKS
        parts.append(_text(x, top + _PANEL_H + 16, f"{tick / _TICKS:.0%}", anchor="middle", colour=_GREY, size=10))
    parts.append(_text(_LEFT + _PANEL_W, top + _PANEL_H + 32, "of the sequences", anchor="end", colour=_GREY, size=10))
    shares = np.linspace(0, 1, _POINTS)
    line = [
        f"{_LEFT + _PANEL_W * share:.1f} {height(value):.1f}"
        for share, value in zip(shares, np.quantile(costs, shares), strict=True)
    ]
    parts.append(f'<path d="M{"L".join(line)}" stroke="{_BLUE}" stroke-width="2" fill="none"/>')
    return parts


def _bar(y: float, order: str, share: float) -> list[str]:
    whole = _LEFT + _PANEL_W - _BAR_LEFT - 48
    colour = _ORANGE if order == AS_PACKED else _BLUE
    return [
        _text(_BAR_LEFT - 8, y + 14, order, anchor="end"),
        f'<rect x="{_BAR_LEFT}" y="{y + 2}" width="{whole}" height="16" fill="{_LINE}"/>',
        f'<rect x="{_BAR_LEFT}" y="{y + 2}" width="{whole * share:.1f}" height="16" fill="{colour}"/>',
        _text(_BAR_LEFT + whole + 6, y + 14, f"{share:.1%}"),
    ]


def _text(x: float, y: float, text: str, *, anchor: str = "start", colour: str = "#1d1d1b", size: int = 12) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}" font-size="{size}">'
        f"{html.escape(text)}</text>"
    )
