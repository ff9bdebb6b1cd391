"""Rows as samples: rendered when they are asked for, bad ones named, long ones treated as the run file says."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal

from megatron_rl.config import DataError
from megatron_rl.data.conversation import Conversation, conversation_of
from megatron_rl.data.mask import MaskConfig
from megatron_rl.data.mixture import Mixture
from megatron_rl.data.packing import Oversized, fit_document
from megatron_rl.data.rank_step import BadRow, Counts
from megatron_rl.data.render import ChatRenderer
from megatron_rl.data.rows import Rows, iterate
from megatron_rl.data.sft import SftDataConfig
from megatron_rl.records import Sample

Fate = Literal["kept", "truncated", "bad", "oversized", "untrained"]
"""What became of a row; see Counts."""


@dataclass(frozen=True)
class SampleRules:
    """What becomes of a row."""

    context_length: int
    """Most tokens of a sample."""
    mask: MaskConfig
    on_bad_row: Literal["error", "skip"]
    oversized: Oversized

    @classmethod
    def of(cls, config: SftDataConfig, context_length: int) -> "SampleRules":
        """Those of a run file."""
        return cls(context_length, config.mask, config.on_bad_row, config.oversized)


@dataclass(frozen=True)
class Outcome:
    """One row by the rules."""

    fate: Fate
    sample: Sample | None = None
    """None for a row that is left out."""
    reason: str = ""
    """Why a bad row is one, its source in front."""


def outcome_of(row: Conversation | DataError, renderer: ChatRenderer, rules: SampleRules) -> Outcome:
    """The row's sample, its id the row's source, or why there is none. DataError where the rules make it one."""
    try:
        if isinstance(row, DataError):
            raise row
        rendered = renderer.render(row, rules.mask)
    except DataError as error:
        if rules.on_bad_row == "error":
            raise
        return Outcome("bad", reason=str(error))
    whole = Sample(sample_id=row.source, token_ids=rendered.token_ids, loss_mask=rendered.loss_mask)
    if not whole.loss_mask.any():
        return Outcome("untrained")
    if len(whole.token_ids) <= rules.context_length:
        return Outcome("kept", whole)
    if rules.oversized == "error":
        raise DataError(
            f"{row.source}: a conversation must have at most context_length = {rules.context_length} tokens, "
            f"got {len(whole.token_ids)}; shorten it, raise context_length, or set data.oversized to truncate or drop"
        )
    cut = fit_document(whole, capacity=rules.context_length - 1, oversized=rules.oversized)
    return Outcome("oversized") if cut is None else Outcome("truncated", cut)


class MixtureSamples:
    """The draws of a mixture as samples, rendered one by one and not kept."""

    def __init__(self, mixture: Mixture, renderer: ChatRenderer, rules: SampleRules) -> None:
        self._mixture, self._renderer, self._rules = mixture, renderer, rules
        self._bad_rows: list[BadRow] = []
        self.counts = Counts((0,) * len(mixture.datasets))

    @property
    def pass_length(self) -> int:
        """Draws of one pass of the mixture."""
        return self._mixture.pass_length

    def read(self, draw: int) -> Sample | None:
        """The draw's sample, or None if its row is left out; counted either way. DataError if that ends the run."""
        outcome = self._outcome(draw)
        dataset, _ = self._mixture.locate(draw)
        rows = list(self.counts.rows)
        rows[dataset] += 1
        self.counts = replace(self.counts, rows=tuple(rows))
        if outcome.fate != "kept":
            self.counts = replace(self.counts, **{outcome.fate: getattr(self.counts, outcome.fate) + 1})
        if outcome.fate == "bad":
            source = self._mixture.source(draw)
            self._bad_rows.append(BadRow(source, outcome.reason.removeprefix(f"{source}: ")))
        return outcome.sample

    def again(self, draw: int) -> Sample:
        """The sample of a draw that was read and counted before."""
        sample = self._outcome(draw).sample
        assert sample is not None, f"draw {draw} gave a sample when it was read"
        return sample

    def take_bad_rows(self) -> list[BadRow]:
        """Those met since this was last asked."""
        taken, self._bad_rows = self._bad_rows, []
        return taken

    def _outcome(self, draw: int) -> Outcome:
        try:
            row: Conversation | DataError = self._mixture.conversation(draw)
        except DataError as error:
            row = error
        return outcome_of(row, self._renderer, self._rules)


@dataclass(frozen=True)
class CheckedRows:
    """What a file holds, as far as it was looked at."""

    count: int
    """Rows of the file."""
    num_checked: int
    """Rows that were looked at, from the first one on."""
    num_samples: int
    """Rows that were not left out."""
    num_tokens: int
    """Of the samples; 0 without a renderer."""
    longest: int
    """Tokens of the longest sample."""
    changed: tuple[tuple[str, int], ...] = ()
    """Why rows gave no sample or a cut one, and how many."""
    first_bad: str = ""
    """The first bad row's source and what is wrong with it."""


def check_rows(rows: Rows, renderer: ChatRenderer | None, rules: SampleRules, limit: int | None) -> CheckedRows:
    """Looks at the first limit rows, or at all; without a renderer only at their form. Constant memory.

    DataError for the first row that would end the run, and where no row that was looked at gives a sample.
    """
    num_tokens, longest, first_bad = 0, 0, ""
    fates: Counter[Fate] = Counter()
    for outcome in _outcomes(rows, renderer, rules, limit):
        fates[outcome.fate] += 1
        first_bad = first_bad or outcome.reason
        length = len(outcome.sample.token_ids) if outcome.sample is not None else 0
        num_tokens, longest = num_tokens + length, max(longest, length)
    num_checked, num_samples = fates.total(), fates["kept"] + fates["truncated"]
    if not num_samples:
        why = ", ".join(f"{count} {fate}" for fate, count in fates.items())
        raise DataError(
            f"data file {rows.path} must have rows that can be trained, got none in "
            f"{num_checked} of {len(rows)}: {why}"
            + (f"; the first: {first_bad}" if first_bad else "; see data.mask, data.oversized, context_length")
            + ("" if num_checked == len(rows) else ", and data.check_rows")
        )
    changed = tuple((fate, count) for fate, count in sorted(fates.items()) if fate != "kept")
    return CheckedRows(len(rows), num_checked, num_samples, num_tokens, longest, changed, first_bad)


def read_samples(rows: Rows, renderer: ChatRenderer, rules: SampleRules) -> Iterator[Sample]:
    """The samples of all rows, in order; what the rules leave out is missing."""
    for outcome in _outcomes(rows, renderer, rules, None):
        if outcome.sample is not None:
            yield outcome.sample


def _outcomes(rows: Rows, renderer: ChatRenderer | None, rules: SampleRules, limit: int | None) -> Iterator[Outcome]:
    for source, found in islice(iterate(rows), limit):
        try:
            row = found if isinstance(found, DataError) else conversation_of(source, found)
        except DataError as error:
            row = error
        if renderer is not None:
            yield outcome_of(row, renderer, rules)
        elif not isinstance(row, DataError):
            yield Outcome("kept")
        elif rules.on_bad_row == "error":
            raise row
        else:
            yield Outcome("bad", reason=str(row))
