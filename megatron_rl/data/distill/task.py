"""What both kinds of distillation have in common for the code that runs them."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from megatron_rl.data.distill.language import LanguageJudge
from megatron_rl.data.distill.rows import SourceRow
from megatron_rl.data.distill.tally import Tally
from megatron_rl.data.endpoint import Endpoint
from megatron_rl.data.journal import Job, Journal


@dataclass(frozen=True)
class Outcome:
    """What is written about one row."""

    row: dict[str, Any] | None
    """For the output; None if it is dropped."""
    dropped: list[dict[str, Any]] = field(default_factory=list)
    """For the file of what was dropped, each with its reason."""


class Task(Protocol):
    """A kind of distillation. All that is asked goes through the journal; finish() asks nothing."""

    columns: Sequence[tuple[str, str]]
    """(title, count or share) of the report's table."""
    caption: str
    """What its columns mean."""
    endpoints: Sequence[Endpoint]
    live: Counter[str]
    """Counts of this run so far, for the progress line."""

    def settings(self) -> dict[str, Any]:
        """All that answers depend on besides the row."""
        ...

    def parse(self, source: str, row: Mapping[str, Any]) -> SourceRow:
        """A usable row. DataError if it is none."""
        ...

    async def check(self) -> list[str]:
        """Notes about the endpoints. An error if they cannot do what is asked."""
        ...

    def jobs(self, row: SourceRow, journal: Journal, judge: LanguageJudge) -> Iterator[tuple[str, Job]]:
        """What is still to be asked about a row, by journal key."""
        ...

    def finish(self, row: SourceRow, journal: Journal, judge: LanguageJudge, tally: Tally) -> Outcome:
        """What came of a row, from the journal alone."""
        ...
