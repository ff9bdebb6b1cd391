"""What one data-parallel rank gets for one optimizer step, whichever way conversations are packed."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from megatron_rl.config import DataError
from megatron_rl.records import PackedBatch, Sample


@dataclass(frozen=True)
class DataRank:
    """A data-parallel rank and the shape of its microbatches."""

    rank: int
    num_ranks: int
    capacity: int
    """Most tokens of a microbatch."""
    pad_multiple: int = 1
    """Tokens of a microbatch are padded to a multiple of this."""
    pad_id: int = 0


@dataclass(frozen=True)
class BadRow:
    """A row that was left out because it cannot be read or rendered."""

    source: str
    """path:line, or path[row] in a file without lines."""
    reason: str


@dataclass(frozen=True)
class Counts:
    """Rows drawn since the start of the run, all passes counted, and what became of them."""

    rows: tuple[int, ...]
    """Of each data set, whatever became of them."""
    bad: int = 0
    """Left out: malformed, or refused by the template."""
    oversized: int = 0
    """Left out: longer than the context."""
    truncated: int = 0
    """Cut at the context."""
    untrained: int = 0
    """Left out: no token of them is trained."""

    def __add__(self, other: "Counts") -> "Counts":
        rows = tuple(a + b for a, b in zip(self.rows, other.rows, strict=True))
        others = {name: count + getattr(other, name) for name, count in asdict(self).items() if name != "rows"}
        return Counts(rows, **others)

    def state_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {**asdict(self), "rows": list(self.rows)}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "Counts":
        """What state_dict gave."""
        return cls(**{**state, "rows": tuple(state["rows"])})


@dataclass(frozen=True)
class RankStep:
    """One step of one rank."""

    microbatches: list[PackedBatch]
    """As many as every other rank has."""
    counts: Counts
    """Over all ranks they sum to what the run has drawn."""
    bad_rows: list[BadRow]
    """Met since the step before; a row that is met in every pass is here as often."""
    state: dict[str, Any]
    """Where the rank stands after this step, as plain data."""


class SampleSource(Protocol):
    """Draws of endless passes over the conversations, as samples. A draw's number alone decides about its sample."""

    @property
    def pass_length(self) -> int:
        """Draws of one pass."""
        ...

    counts: Counts
    """Of the draws that were read."""

    def read(self, draw: int) -> Sample | None:
        """The draw's sample, or None if its row is left out; counted either way. DataError if that ends the run."""
        ...

    def again(self, draw: int) -> Sample:
        """The sample of a draw that was read and counted before."""
        ...

    def take_bad_rows(self) -> list[BadRow]:
        """Those met since this was last asked."""
        ...


class SampleStream(Protocol):
    """Steps without end."""

    def next_step(self) -> RankStep:
        """The next step of this rank. DataError for a row that ends the run."""
        ...

    def load(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Goes on where the states of all ranks were taken, at one step of a run of any number of ranks."""
        ...


_PASSES = 16
"""A rank reads its share of each pass, in an order of the pass's own: with one good row, it misses that row in as many
draws as a pass has with a chance of 1/e, and in 16 passes' draws with one of 1e-7."""


class PassGuard:
    """Ends a run whose rows are all left out, instead of reading on for ever."""

    def __init__(self, pass_length: int) -> None:
        self._pass_length = pass_length
        self._left_out = 0
        """Draws since the last one with a sample."""

    def sample(self, sample: Sample | None) -> Sample | None:
        """What a draw gave, as it is. DataError when the draws of _PASSES passes gave nothing."""
        self._left_out = self._left_out + 1 if sample is None else 0
        if self._left_out >= _PASSES * self._pass_length:
            raise DataError(
                f"data.train must have a row that can be trained, but {_PASSES} passes, {self._left_out} draws, were "
                "left out; see bad_rows.jsonl in the run folder, data.oversized and data.mask"
            )
        return sample
