"""Packing kind stream: every rank packs its own share of the draws and hands microbatches out by the shared cost order.

Invariant: every draw of the mixture is in exactly one place: trained, left out with a reason, in an open bin, in the
buffer, or not read yet. Rank r of n reads draws r, r + n, r + 2 n, ...; ranks never talk to each other about them. The
state names draws and not tokens: what was packed but not trained is rendered again on resume.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_rl.config import ConfigError
from megatron_rl.data.cost_buffer import CostSortedBuffer
from megatron_rl.data.next_k_fit import NextKFit
from megatron_rl.data.packing import pack_samples
from megatron_rl.data.rank_step import Counts, DataRank, PassGuard, RankStep, SampleSource
from megatron_rl.data.sft import StreamPacking
from megatron_rl.records import PackedBatch, Sample

Cost = Callable[[Sequence[int]], float]
"""Document lengths of a microbatch -> what it costs, in any unit."""
Document = tuple[int, Sample]
"""(draw, its sample)"""


class RankDraws:
    """Numbers of the draws a rank reads: first what an earlier number of ranks left to it, then every num_ranks-th."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self._counted: deque[int] = deque()
        """Read and counted by an earlier number of ranks, but not trained."""
        self._left: deque[int] = deque()
        """Not read yet, and before next."""
        self._next, self._num_ranks = rank, num_ranks

    def take(self) -> tuple[int, bool]:
        """(the next one, whether it was read and counted before)"""
        if self._counted:
            return self._counted.popleft(), True
        if self._left:
            return self._left.popleft(), False
        self._next += self._num_ranks
        return self._next - self._num_ranks, False

    def state_dict(self) -> dict[str, Any]:
        return {"counted": list(self._counted), "left": list(self._left), "next": self._next}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._counted, self._left, self._next = deque(state["counted"]), deque(state["left"]), state["next"]


class PackedStream:
    """The steps of one rank: microbatches_per_step microbatches of at most capacity tokens in each.

    Holds the samples of open_bins + buffer microbatches. Reading keeps pace with training: once the buffer is full, one
    microbatch is packed for each that is handed out.
    """

    def __init__(self, source: SampleSource, config: StreamPacking, place: DataRank, *, cost: Cost, seed: int) -> None:
        self._source, self._config, self._place, self._cost = source, config, place, cost
        self._guard = PassGuard(source.pass_length)
        self._draws = RankDraws(place.rank, place.num_ranks)
        self._packer: NextKFit[Document] = NextKFit(place.capacity, config.open_bins)
        self._buffer: CostSortedBuffer[list[Document]] = CostSortedBuffer(config.buffer, seed=seed)

    def next_step(self) -> RankStep:
        """The next step of this rank; the first one fills the buffer. DataError for a row that ends the run."""
        microbatches = [self._microbatch() for _ in range(self._config.microbatches_per_step)]
        return RankStep(microbatches, self._source.counts, self._source.take_bad_rows(), self.state_dict())

    def state_dict(self) -> dict[str, Any]:
        """Where this rank stands: the numbers of the draws it holds and of the next one to read."""
        packer, buffer = self._packer.state_dict(), self._buffer.state_dict()
        return {
            "counts": self._source.counts.state_dict(),
            "draws": self._draws.state_dict(),
            "packer": {**packer, "items": _numbers(packer["items"])},
            "buffer": {**buffer, "filling": _numbers(buffer["filling"]), "sorted": _numbers(buffer["sorted"])},
        }

    def load(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Goes on where the ranks' states were taken.

        The same number of ranks goes on exactly. Any other number shares out what the ranks had read and not trained,
        in the order of the draws, before it reads on: no row is lost or repeated, but microbatches differ. ConfigError
        if conversations have other lengths now than when they were packed.
        """
        rank, num_ranks = self._place.rank, self._place.num_ranks
        own = states[rank] if len(states) == num_ranks else _shared_out(states, rank, num_ranks)
        self._source.counts = Counts.from_state(own["counts"])
        self._draws.load_state_dict(own["draws"])
        packer, buffer = own["packer"], own["buffer"]
        open_bins = self._documents(packer["items"])
        self._packer.load_state_dict({**packer, "items": open_bins})
        held = {name: self._documents(buffer[name]) for name in ("filling", "sorted")}
        self._buffer.load_state_dict({**buffer, **held})
        self._check_lengths(open_bins, packer["rooms"])
        for closed in held.values():
            self._check_lengths(closed, None)

    def _microbatch(self) -> PackedBatch:
        """Hands out the next microbatch and packs another one in its place."""
        while not self._buffer.ready:
            self._pack_one()
        place = self._place
        samples = [sample for _, sample in self._buffer.draw()]
        self._pack_one()
        (batch,) = pack_samples(samples, capacity=place.capacity, pad_multiple=place.pad_multiple, pad_id=place.pad_id)
        return batch

    def _pack_one(self) -> None:
        """Reads until one bin closes."""
        while True:
            draw, counted = self._draws.take()
            sample = self._guard.sample(self._source.again(draw) if counted else self._source.read(draw))
            if sample is None:
                continue
            closed = self._packer.add(_num_positions(sample), (draw, sample))
            if closed is not None:
                self._buffer.push(closed, self._cost([_num_positions(sample) for _, sample in closed]))
                return

    def _check_lengths(self, bins: Sequence[list[Document]], rooms: Sequence[int] | None) -> None:
        """ConfigError unless bins leave those rooms; None: they fit."""
        for number, documents in enumerate(bins):
            room = self._place.capacity - sum(_num_positions(sample) for _, sample in documents)
            if room < 0 or (rooms is not None and room != rooms[number]):
                raise ConfigError(
                    "a run must resume with conversations as long as they were, but those packed with "
                    f"{documents[0][1].sample_id} are not; restore the template, which may write the date, and "
                    "eos_token_id in generation_config.json, or start in a new run folder"
                )

    def _documents(self, bins: Sequence[Sequence[int]]) -> list[list[Document]]:
        return [[(draw, self._source.again(draw)) for draw in draws] for draws in bins]


def _num_positions(sample: Sample) -> int:
    return len(sample.token_ids) - 1


def _numbers(bins: Sequence[Sequence[Document]]) -> list[list[int]]:
    return [[draw for draw, _ in documents] for documents in bins]


def _shared_out(states: Sequence[Mapping[str, Any]], rank: int, num_ranks: int) -> dict[str, Any]:
    """A rank's state when another number of ranks goes on: its share of what the old ones had not trained."""
    nexts, counted, left = [state["draws"]["next"] for state in states], [], []
    first = max(nexts)
    for after, state in zip(nexts, states, strict=True):
        draws, packer, buffer = state["draws"], state["packer"], state["buffer"]
        left += [*draws["left"], *range(after, first, len(states))]
        held = (draws["counted"], *packer["items"], *buffer["filling"], *buffer["sorted"])
        counted += [draw for bin_draws in held for draw in bin_draws]
    counts = [Counts.from_state(state["counts"]) for state in states]
    total = sum(counts[1:], counts[0])
    packer, buffer = states[0]["packer"], states[0]["buffer"]
    number = max(state["buffer"]["number"] for state in states)
    return {
        "counts": (total if rank == 0 else Counts((0,) * len(total.rows))).state_dict(),
        "draws": {
            "counted": sorted(counted)[rank::num_ranks],
            "left": sorted(left)[rank::num_ranks],
            "next": first + rank,
        },
        "packer": {**packer, "rooms": [], "items": []},
        "buffer": {**buffer, "number": number, "costs": [], "filling": [], "sorted": []},
    }
