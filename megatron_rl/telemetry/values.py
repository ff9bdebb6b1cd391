"""Metrics that carry their reduction: the same measurements, split in any way over ranks, merge to the same value.

Every value is a frozen dataclass with `merge` (associative, and commutative except for Last) and `result`.
On the wire a value is (kind, a, b); msgpack and JSON both carry it.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

WireValue = tuple[str, float, float]
"""(kind, a, b): the two numbers of a value; b is 0 where a kind has one number."""

Z_95 = 1.959963984540054
"""Two-sided 95% quantile of the standard normal distribution."""


@dataclass(frozen=True)
class Mean:
    """A total over a count, in the unit of the total; NaN while nothing was counted."""

    total: float
    count: float

    def merge(self, other: "Mean") -> "Mean":
        return Mean(self.total + other.total, self.count + other.count)

    def result(self) -> float:
        return self.total / self.count if self.count else math.nan


@dataclass(frozen=True)
class Sum:
    """A total that adds up over parts: tokens, dropped groups, seconds of work."""

    value: float

    def merge(self, other: "Sum") -> "Sum":
        return Sum(self.value + other.value)

    def result(self) -> float:
        return self.value


@dataclass(frozen=True)
class Max:
    """The largest part. NaN, and not the largest number, if any part is NaN: a broken part must show."""

    value: float

    def merge(self, other: "Max") -> "Max":
        return Max(_nan_or(max, self.value, other.value))

    def result(self) -> float:
        return self.value


@dataclass(frozen=True)
class Min:
    """The smallest part. NaN if any part is NaN."""

    value: float

    def merge(self, other: "Min") -> "Min":
        return Min(_nan_or(min, self.value, other.value))

    def result(self) -> float:
        return self.value


@dataclass(frozen=True)
class Last:
    """What was merged last: learning rate, weight version, anything equal on all parts."""

    value: float

    def merge(self, other: "Last") -> "Last":
        return other

    def result(self) -> float:
        return self.value


@dataclass(frozen=True)
class Rate:
    """A share of yes-or-no outcomes; result in [0, 1], NaN while nothing was counted."""

    successes: float
    count: float

    def __post_init__(self) -> None:
        if not 0 <= self.successes <= self.count:
            raise ValueError(
                f"a Rate has 0 <= successes <= count, got {self.successes} of {self.count}; use Mean for other ratios"
            )

    def merge(self, other: "Rate") -> "Rate":
        return Rate(self.successes + other.successes, self.count + other.count)

    def result(self) -> float:
        return self.successes / self.count if self.count else math.nan

    def interval(self) -> tuple[float, float]:
        """Wilson 95% interval (low, high), always inside [0, 1]; (0, 1) while nothing was counted. (Wilson 1927)

        Treats outcomes as independent: rollouts of one prompt are not quite, so it is a little narrow for groups.
        """
        if not self.count:
            return 0.0, 1.0
        rate, z2_per_count = self.result(), Z_95**2 / self.count
        centre = (rate + z2_per_count / 2) / (1 + z2_per_count)
        spread = rate * (1 - rate) / self.count + (Z_95 / (2 * self.count)) ** 2
        half = Z_95 * math.sqrt(spread) / (1 + z2_per_count)
        low = 0.0 if self.successes == 0 else max(0.0, centre - half)
        high = 1.0 if self.successes == self.count else min(1.0, centre + half)
        return low, high


Value = Mean | Sum | Max | Min | Last | Rate

_ONE_NUMBER: dict[str, type[Sum] | type[Max] | type[Min] | type[Last]] = {
    "sum": Sum,
    "max": Max,
    "min": Min,
    "last": Last,
}


def to_wire(value: Value) -> WireValue:
    """The value as (kind, a, b)."""
    match value:
        case Mean(total, count):
            return "mean", float(total), float(count)
        case Rate(successes, count):
            return "rate", float(successes), float(count)
        case Sum(number) | Max(number) | Min(number) | Last(number):
            return type(value).__name__.lower(), float(number), 0.0
    raise ValueError(f"a metric is a Mean, Rate, Sum, Max, Min or Last, got {type(value).__name__}")


def from_wire(wire: WireValue) -> Value:
    """(kind, a, b), as a tuple or a list, back as a value; ValueError for a kind that does not exist."""
    kind, first, second = wire
    if kind == "mean":
        return Mean(first, second)
    if kind == "rate":
        return Rate(first, second)
    if kind in _ONE_NUMBER:
        return _ONE_NUMBER[kind](first)
    raise ValueError(f"a metric's kind is one of {['mean', 'rate', *_ONE_NUMBER]}, got {kind!r}")


def merge_metrics(parts: Iterable[Mapping[str, Value]]) -> dict[str, Value]:
    """One dict over all parts, merged in order. A part may lack a name; it then adds nothing to it.

    ValueError names the metric if two parts reduce it differently.
    """
    merged: dict[str, Value] = {}
    for part in parts:
        for name, value in part.items():
            merged[name] = _merge_pair(name, merged[name], value) if name in merged else value
    return merged


def reduce_over_ranks(
    metrics: Mapping[str, Value], gather: Callable[[dict[str, WireValue]], list[dict[str, WireValue]]]
) -> dict[str, Value]:
    """The metrics of all ranks, merged in rank order and equal on every rank.

    gather takes this rank's plain dict and returns those of all ranks (torch.distributed.all_gather_object, say).
    """
    gathered = gather({name: to_wire(value) for name, value in metrics.items()})
    return merge_metrics({name: from_wire(wire) for name, wire in part.items()} for part in gathered)


def _merge_pair(name: str, left: Value, right: Value) -> Value:
    match left, right:
        case (Mean(), Mean()) | (Sum(), Sum()) | (Max(), Max()) | (Min(), Min()) | (Last(), Last()) | (Rate(), Rate()):
            return left.merge(right)  # pyright: ignore[reportArgumentType]  # the cases pair equal kinds
    raise ValueError(
        f"metric {name!r} must have one kind everywhere, got {type(left).__name__} and {type(right).__name__}"
    )


def _nan_or(choose: Callable[[float, float], float], left: float, right: float) -> float:
    return math.nan if math.isnan(left) or math.isnan(right) else choose(left, right)
