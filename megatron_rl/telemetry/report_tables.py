"""The page's tables, as HTML that needs no script."""

import html
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_rl.telemetry.report_curves import Series, short

_NUMBERS = ("values", "first", "last", "least", "greatest")


def summary_table(rows: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Pass rates by split: name, rate, 95% interval, attempts, and the interval drawn on [0, 1]."""
    if not rows:
        return "<p>No held-out pass rates were recorded.</p>"
    body = []
    for split in dict.fromkeys(split for split, _ in rows):
        body.append(f'<tr class="split"><th scope="rowgroup" colspan="5">{html.escape(str(split))}</th></tr>')
        for row in [row for of_split, row in rows if of_split == split]:
            rate, low, high = float(row["rate"]), float(row["low"]), float(row["high"])
            body.append(
                f'<tr><th scope="row">{html.escape(str(row["name"]))}</th><td>{rate:.3f}</td>'
                f"<td>{low:.3f}–{high:.3f}</td><td>{short(row['n'])}</td>"
                f'<td class="drawn">{_interval_svg(rate, low, high)}</td></tr>'
            )
    return (
        '<table class="summary"><thead><tr><th scope="col"></th><th scope="col">pass rate</th>'
        '<th scope="col">95% interval</th><th scope="col">attempts</th>'
        '<th scope="col" class="drawn"><span>0</span><span>1</span></th></tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table>"
    )


def _interval_svg(rate: float, low: float, high: float) -> str:
    def x(share: float) -> str:
        return f"{8 + 184 * share:.1f}"

    return (
        '<svg viewBox="0 0 200 16" width="200" height="16" aria-hidden="true">'
        f'<path class="grid" d="M{x(0)} 0V16M{x(0.5)} 0V16M{x(1)} 0V16"/>'
        f'<path class="band" d="M{x(low)} 8H{x(high)}"/><circle cx="{x(rate)}" cy="8" r="4"/></svg>'
    )


def metrics_table(series: Sequence[Series], names: Sequence[str]) -> str:
    """Every recorded metric with its first, last, least and greatest value; also what a reader without script sees."""
    several = len(names) > 1
    head = "".join(f'<th scope="col">{title}</th>' for title in (*(["run"] if several else []), "phase", "metric"))
    head += "".join(f'<th scope="col" class="number">{title}</th>' for title in _NUMBERS)
    body = []
    for one in series:
        values = [point.value for point in one.points if point.value is not None]
        numbers = [values[0], values[-1], min(values), max(values)] if values else [None] * 4
        run = f"<td>{html.escape(names[one.run])}</td>" if several else ""
        cells = "".join(f'<td class="number">{"–" if number is None else short(number)}</td>' for number in numbers)
        body.append(
            f'<tr>{run}<td>{html.escape(one.phase)}</td><th scope="row">{html.escape(one.name)}</th>'
            f'<td class="number">{len(values)}</td>{cells}</tr>'
        )
    return f'<table class="metrics"><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table>'
