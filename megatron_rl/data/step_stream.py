"""Packing kind step: samples_per_step samples a step, spread over the ranks; the same steps for any number of ranks."""

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_rl.data.packing import pack_for_ranks
from megatron_rl.data.rank_step import Counts, DataRank, PassGuard, RankStep, SampleSource
from megatron_rl.records import Sample


class StepStream:
    """Every rank reads every draw and keeps its share of each step; rank 0 counts what was read.

    A pass's rest is carried over into the next step, so every draw is trained exactly once.
    """

    def __init__(self, source: SampleSource, samples_per_step: int, place: DataRank) -> None:
        self._source, self._samples_per_step, self._place = source, samples_per_step, place
        self._guard = PassGuard(source.pass_length)
        self._next_draw = 0

    def next_step(self) -> RankStep:
        """This rank's microbatches of the next samples_per_step samples. DataError for a row that ends the run."""
        samples = [self._next_sample() for _ in range(self._samples_per_step)]
        place = self._place
        of_rank = pack_for_ranks(
            samples,
            capacity=place.capacity,
            data_parallel_size=place.num_ranks,
            pad_multiple=place.pad_multiple,
            pad_id=place.pad_id,
        )
        counts, bad_rows = self._source.counts, self._source.take_bad_rows()
        if place.rank > 0:
            counts, bad_rows = Counts((0,) * len(counts.rows)), []
        return RankStep(of_rank[place.rank], counts, bad_rows, self.state_dict())

    def state_dict(self) -> dict[str, Any]:
        """The same on every rank."""
        return {"next_draw": self._next_draw, "counts": self._source.counts.state_dict()}

    def load(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Goes on where the states of any number of ranks were taken."""
        self._next_draw = states[0]["next_draw"]
        self._source.counts = Counts.from_state(states[0]["counts"])

    def _next_sample(self) -> Sample:
        while True:
            self._next_draw += 1
            sample = self._guard.sample(self._source.read(self._next_draw - 1))
            if sample is not None:
                return sample
