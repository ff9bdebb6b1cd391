"""Reference groups of effort labels: rows of one dataset and difficulty, whose lengths set each other's thresholds."""

from array import array
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from megatron_rl.config import DataError
from megatron_rl.data.conversation import EFFORTS
from megatron_rl.data.effort import MIN_TRACES, Thresholds, length_thresholds

MAX_LEVELS = 1000
"""Levels of difficulty of one dataset; more are a column of something else, and mostly groups of a single row."""

Origin = Literal["group", "dataset", "few", "none"]


class Measured:
    """Length and level of every row of one dataset, in the order added: 6 bytes each."""

    def __init__(self, dataset: str) -> None:
        self.dataset = dataset
        self.levels: list[str] = []
        """Names by level number, in the order met."""
        self._numbers: dict[str, int] = {}
        self._lengths, self._level_of = array("i"), array("H")

    def add(self, source: str, length: int, level: str) -> None:
        """One more row. DataError with its source if the dataset has too many levels."""
        number = self._numbers.setdefault(level, len(self.levels))
        if number == len(self.levels):
            if number == MAX_LEVELS:
                raise DataError(
                    f"{source}: a dataset must have at most {MAX_LEVELS} levels of difficulty, got {level!r} as one "
                    "more; name a column with few values"
                )
            self.levels.append(level)
        self._lengths.append(length)
        self._level_of.append(number)

    @property
    def lengths(self) -> np.ndarray:
        """int32 [rows]: tokens of each row's reasoning."""
        return np.frombuffer(self._lengths, dtype=np.int32)

    @property
    def level_of(self) -> np.ndarray:
        """uint16 [rows]: number of each row's level."""
        return np.frombuffer(self._level_of, dtype=np.uint16)


@dataclass
class Group:
    """One group of the report."""

    dataset: str
    difficulty: str
    rows: int
    traces: int
    """Rows with any reasoning."""
    thresholds: Thresholds | None
    """Those its labels are drawn with; None if the dataset has no trace."""
    origin: Origin
    """Whose percentiles they are: the group's; the dataset's, as the group has fewer than MIN_TRACES traces; or the
    dataset's though that has fewer, too."""
    median: float | None
    """Of the traces' lengths, in tokens."""
    counts: dict[str, int]
    """Rows by label."""

    def as_json(self) -> dict[str, Any]:
        """Flat, for the report."""
        edges = asdict(self.thresholds) if self.thresholds else {"l30": None, "l70": None}
        kept = {key: value for key, value in asdict(self).items() if key != "thresholds"}
        return kept | edges


def groups_of(measured: Measured) -> list[Group]:
    """One group for each level of a dataset, in the order of measured.levels, without counts of labels yet.

    A group of fewer than MIN_TRACES traces takes the dataset's percentiles. A dataset with fewer takes them all the
    same: other datasets' lengths differ by orders of magnitude, so its own few say more, and the report names it.
    """
    of_dataset = length_thresholds(measured.lengths)
    num_traces = int((measured.lengths > 0).sum())
    groups = []
    for number, level in enumerate(measured.levels):
        lengths = measured.lengths[measured.level_of == number]
        traces = lengths[lengths > 0]
        own = traces.size >= MIN_TRACES
        origin: Origin = "group" if own else "dataset" if num_traces >= MIN_TRACES else "few" if num_traces else "none"
        groups.append(
            Group(
                dataset=measured.dataset,
                difficulty=level,
                rows=int(lengths.size),
                traces=int(traces.size),
                thresholds=length_thresholds(lengths) if own else of_dataset,
                origin=origin,
                median=float(np.median(traces)) if traces.size else None,
                counts=dict.fromkeys(EFFORTS, 0),
            )
        )
    return groups
