"""metrics.jsonl -> the series and charts of the page."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from megatron_rl.telemetry.glossary import SECTIONS, Panel, matches
from megatron_rl.telemetry.sinks import RESERVED

MAX_POINTS = 600
MAX_POINTS_ON_PAGE = 60_000

_INTERVAL = ("low", "high", "n")


@dataclass(frozen=True)
class Point:
    """One value of a metric; low, high and n belong to a Rate."""

    step: int
    value: float | None
    low: float | None = None
    high: float | None = None
    n: float | None = None


@dataclass(frozen=True)
class Series:
    """One metric of one phase of one run, by rising step."""

    run: int
    phase: str
    name: str
    points: tuple[Point, ...]
    thinned_from: int = 0
    """Points before thinning; 0 if all are there."""

    @property
    def is_rate(self) -> bool:
        return any(point.n is not None for point in self.points)


@dataclass(frozen=True)
class Chart:
    """One panel of the page and the series (index, label) it draws."""

    section: str
    panel: Panel
    lines: tuple[tuple[int, str], ...]


def collect_series(records: Sequence[Mapping[str, Any]], *, run: int) -> list[Series]:
    """Every metric of a run. Of two records with the same step the later one counts."""
    found: dict[tuple[str, str], dict[int, Point]] = {}
    for record in records:
        for name in record:
            if name in RESERVED or _is_interval_part(name, record) or not isinstance(record[name], float | int | None):
                continue
            extra = {part: record.get(f"{name}/{part}") for part in _INTERVAL} if _is_rate(name, record) else {}
            point = Point(step=record["step"], value=record[name], **extra)
            found.setdefault((record["phase"], name), {})[point.step] = point
    return [
        Series(run, phase, name, tuple(points[step] for step in sorted(points)))
        for (phase, name), points in found.items()
    ]


def thin_all(series: Sequence[Series]) -> list[Series]:
    """The series with at most MAX_POINTS points each and MAX_POINTS_ON_PAGE in all."""
    limit = min(MAX_POINTS, max(8, MAX_POINTS_ON_PAGE // max(1, len(series))))
    return [thin(one, limit) for one in series]


def thin(series: Series, limit: int) -> Series:
    """At most about limit points: first, last, and the least and greatest of even stretches, so that peaks stay."""
    points = series.points
    if len(points) <= limit:
        return series
    stretches = max(1, limit // 2 - 1)
    keep = {0, len(points) - 1}
    for index in range(stretches):
        start, end = index * len(points) // stretches, (index + 1) * len(points) // stretches
        finite = [(value, i) for i in range(start, end) if (value := points[i].value) is not None]
        keep |= {min(finite)[1], max(finite)[1]} if finite else {start}
    return Series(series.run, series.phase, series.name, tuple(points[i] for i in sorted(keep)), len(points))


def build_charts(series: Sequence[Series], run_names: Sequence[str]) -> tuple[list[Chart], list[Chart]]:
    """(charts of the known metrics in reading order, one chart for each metric that no panel knows)."""
    charts: list[Chart] = []
    used: set[int] = set()
    for section in SECTIONS:
        for panel in section.panels:
            members = [
                index
                for pattern in panel.patterns
                for index, one in enumerate(series)
                if one.phase == section.phase and matches(one.name, pattern)
            ]
            members = list(dict.fromkeys(members))
            if members:
                used.update(members)
                charts.append(Chart(section.title, panel, _labels(members, series, run_names)))
    unknown: dict[tuple[str, str], list[int]] = {}
    for index, one in enumerate(series):
        if index not in used:
            unknown.setdefault((one.phase, one.name), []).append(index)
    others = [
        Chart(phase, Panel(name, "", (name,)), _labels(members, series, run_names))
        for (phase, name), members in sorted(unknown.items())
    ]
    return charts, others


def _labels(members: list[int], series: Sequence[Series], run_names: Sequence[str]) -> tuple[tuple[int, str], ...]:
    """The shortest label that tells each line from the others: the end of its name, and its run if there are two."""
    names = list(dict.fromkeys(series[index].name for index in members))
    several_runs = len({series[index].run for index in members}) > 1
    shared = 0
    if len(names) > 1:
        shared = next(i for i in count() if len({tuple(name.split("/")[: i + 1]) for name in names}) > 1)
    labels = []
    for index in members:
        label = "/".join(series[index].name.split("/")[shared:])
        if several_runs:
            run = run_names[series[index].run]
            label = f"{label} · {run}" if len(names) > 1 else run
        labels.append((index, label))
    return tuple(labels)


def _is_rate(name: str, record: Mapping[str, Any]) -> bool:
    return all(f"{name}/{part}" in record for part in _INTERVAL)


def _is_interval_part(name: str, record: Mapping[str, Any]) -> bool:
    base, _, part = name.rpartition("/")
    return part in _INTERVAL and base in record and _is_rate(base, record)


def series_json(series: Iterable[Series]) -> list[dict[str, Any]]:
    """The series as the page's script reads them, to six significant digits."""
    out = []
    for one in series:
        entry: dict[str, Any] = {
            "name": one.name,
            "step": [point.step for point in one.points],
            "value": [short(point.value) for point in one.points],
        }
        if one.is_rate:
            entry |= {part: [short(getattr(point, part)) for point in one.points] for part in _INTERVAL}
        if one.thinned_from:
            entry["thinned_from"] = one.thinned_from
        out.append(entry)
    return out


def short(value: float | None, digits: int = 6) -> float | None:
    """The number with that many significant digits; whole numbers lose their .0."""
    if value is None:
        return None
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded
