"""SFT streams: every draw once, the same steps after a restart at any place, the tokens that rendering gave."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.config import ConfigError, DataError
from megatron_rl.data.ahead import StepsAhead
from megatron_rl.data.cost import attention_cost
from megatron_rl.data.packed_stream import PackedStream
from megatron_rl.data.rank_step import BadRow, Counts, DataRank, RankStep, SampleStream
from megatron_rl.data.sft import StreamPacking
from megatron_rl.data.step_stream import StepStream
from megatron_rl.records import PackedBatch, Sample, wire

CAPACITY = 40
Streams = list[SampleStream]
Make = Callable[[int], Streams]


class Source:
    """Draws of num_rows rows of 2 to 40 tokens in endless passes; rows in left_out give no sample."""

    def __init__(self, num_rows: int, left_out: Sequence[int] = ()) -> None:
        self.pass_length, self._left_out = num_rows, left_out
        self._sizes = np.random.default_rng(0).integers(2, CAPACITY + 1, num_rows)
        self.counts = Counts((0, 0))
        self._bad: list[BadRow] = []

    def read(self, draw: int) -> Sample | None:
        row = draw % self.pass_length
        rows = (self.counts.rows[0] + 1 - row % 2, self.counts.rows[1] + row % 2)
        self.counts = replace(self.counts, rows=rows)
        if row not in self._left_out:
            return self.again(draw)
        self.counts = replace(self.counts, bad=self.counts.bad + 1)
        self._bad.append(BadRow(f"rows:{row}", "odd"))
        return None

    def again(self, draw: int) -> Sample:
        size = self._sizes[draw % self.pass_length]
        assert draw % self.pass_length not in self._left_out
        return Sample(str(draw), np.arange(size, dtype=np.int32) + 100 * draw, np.arange(size) > size // 2)

    def take_bad_rows(self) -> list[BadRow]:
        taken, self._bad = self._bad, []
        return taken


def place(rank: int, num_ranks: int) -> DataRank:
    return DataRank(rank, num_ranks, CAPACITY, pad_multiple=2, pad_id=9)


def step_streams(num_rows: int, samples_per_step: int, num_ranks: int, left_out: Sequence[int] = ()) -> Streams:
    return [StepStream(Source(num_rows, left_out), samples_per_step, place(r, num_ranks)) for r in range(num_ranks)]


def packed_streams(
    num_rows: int, config: StreamPacking, num_ranks: int, *, seed: int = 3, left_out: Sequence[int] = ()
) -> Streams:
    sources = [Source(num_rows, left_out) for _ in range(num_ranks)]
    return [
        PackedStream(source, config, place(rank, num_ranks), cost=attention_cost, seed=seed)
        for rank, source in enumerate(sources)
    ]


def stream_config(open_bins: int = 3, buffer: int = 4, microbatches_per_step: int = 1) -> StreamPacking:
    return StreamPacking(open_bins=open_bins, buffer=buffer, microbatches_per_step=microbatches_per_step)


def encoded(step: RankStep) -> tuple[bytes, Any]:
    """Everything about a step but its state."""
    return b"".join(map(wire.encode, step.microbatches)), (step.counts, step.bad_rows)


def states_of(steps: Sequence[RankStep]) -> list[dict[str, Any]]:
    """The ranks' states as a checkpoint keeps them."""
    return json.loads(json.dumps([step.state for step in steps]))


def draws_of(batches: Sequence[PackedBatch]) -> list[int]:
    return [int(name) for batch in batches for name in batch.sample_ids]


def taken_by(streams: Streams, num_steps: int) -> tuple[list[int], list[dict[str, Any]]]:
    """(draws of all ranks in num_steps steps, the ranks' states after them)"""
    draws, steps = [], []
    for _ in range(num_steps):
        steps = [stream.next_step() for stream in streams]
        draws += [draw for step in steps for draw in draws_of(step.microbatches)]
    return draws, states_of(steps)


def held_by(states: Sequence[dict[str, Any]]) -> list[int]:
    """Draws that are read and not trained."""
    bins = [b for s in states for b in (*s["packer"]["items"], *s["buffer"]["filling"], *s["buffer"]["sorted"])]
    return [draw for draws in bins for draw in draws] + [draw for s in states for draw in s["draws"]["counted"]]


KINDS: dict[str, Make] = {
    "step": lambda num_ranks: step_streams(7, 5, num_ranks, left_out=[2]),
    "stream": lambda num_ranks: packed_streams(7, stream_config(), num_ranks, left_out=[2]),
    "stream, two microbatches a step": lambda num_ranks: packed_streams(11, stream_config(2, 3, 2), num_ranks),
    "stream, unsorted": lambda num_ranks: packed_streams(5, stream_config(1, 1), num_ranks),
}


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_stopped_after_any_step_goes_on_like_one_that_was_not(kind: str, num_ranks: int) -> None:
    """Through several passes and buffers: in the middle of one, at its end, with rows left out."""
    whole = KINDS[kind](num_ranks)
    steps = [[stream.next_step() for stream in whole] for _ in range(24)]
    assert steps[-1][0].counts.rows[0] > 3 * 4, "several passes"
    for cut in range(1, 20):
        resumed = KINDS[kind](num_ranks)
        for stream in resumed:
            stream.load(states_of(steps[cut - 1]))
        for expected in steps[cut : cut + 5]:
            got = [stream.next_step() for stream in resumed]
            assert [encoded(step) for step in got] == [encoded(step) for step in expected], f"resumed after {cut}"
            assert states_of(got) == states_of(expected)


@given(st.integers(1, 12), st.integers(1, 15), st.integers(1, 4))
def test_a_steps_samples_are_the_next_draws_for_any_number_of_ranks(
    num_rows: int, samples_per_step: int, num_ranks: int
) -> None:
    streams, left = step_streams(num_rows, samples_per_step, num_ranks), 0
    for number in range(6):
        steps = [stream.next_step() for stream in streams]
        assert len({len(step.microbatches) for step in steps}) == 1
        draws = sorted(draw for step in steps for draw in draws_of(step.microbatches))
        assert draws == list(range(number * samples_per_step, (number + 1) * samples_per_step))
        left = sum(sum(step.counts.rows) for step in steps)
        assert left == (number + 1) * samples_per_step, "rows are counted once, not on every rank"


@given(st.integers(1, 12), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
@settings(max_examples=60)
def test_every_draw_is_trained_held_or_unread(
    num_rows: int, open_bins: int, buffer: int, per_step: int, num_ranks: int
) -> None:
    """And trained by the rank it belongs to, in as many microbatches on each, none over capacity."""
    streams = packed_streams(num_rows, stream_config(open_bins, buffer, per_step), num_ranks)
    trained: list[int] = []
    for _ in range(6):
        steps = [stream.next_step() for stream in streams]
        for rank, step in enumerate(steps):
            assert len(step.microbatches) == per_step
            assert all(batch.num_tokens - batch.num_padding <= CAPACITY for batch in step.microbatches)
            draws = draws_of(step.microbatches)
            assert all(draw % num_ranks == rank for draw in draws)
            trained += draws
            read = range(rank, step.state["draws"]["next"], num_ranks)
            own = [draw for draw in trained if draw % num_ranks == rank]
            assert sorted(own + held_by([step.state])) == list(read)


@given(st.lists(st.integers(1, 4), min_size=2, max_size=5), st.integers(1, 9), st.integers(1, 4))
@settings(max_examples=60)
def test_another_number_of_ranks_loses_and_repeats_no_draw(worlds: list[int], num_rows: int, buffer: int) -> None:
    """However often the number changes, also before what was left over is used up."""
    trained, states = taken_by(packed_streams(num_rows, stream_config(2, buffer), worlds[0]), 3)
    for number, num_ranks in enumerate(worlds[1:]):
        streams = packed_streams(num_rows, stream_config(2, buffer), num_ranks)
        for stream in streams:
            stream.load(states)
        drawn, states = taken_by(streams, 1 + number)
        trained += drawn
    nexts = [state["draws"]["next"] for state in states]
    unread = [draw for after in nexts for draw in range(after, max(nexts), len(states))]
    unread += [draw for state in states for draw in state["draws"]["left"]]
    assert sorted([*trained, *held_by(states), *unread]) == list(range(max(nexts)))
    counts = sum((Counts.from_state(state["counts"]) for state in states), Counts((0, 0)))
    assert sum(counts.rows) == len(trained) + len(held_by(states)), "every draw that was read is counted once"


def test_ranks_draw_the_same_place_of_their_sorted_buffers() -> None:
    """Place by cost of the i-th microbatch of buffer n: default_rng([seed, n]).permutation(size)[i] on every rank."""
    size, seed = 6, 11
    streams = packed_streams(1000, stream_config(4, size), 3, seed=seed)
    for number in range(4):
        order = np.random.default_rng([seed, number]).permutation(size)
        for stream in streams:
            taken = [stream.next_step().microbatches[0] for _ in range(size)]
            costs = [attention_cost(np.diff(b.cu_seqlens[: len(b.sample_ids) + 1])) for b in taken]
            by_cost = sorted(costs)
            assert costs == [by_cost[place] for place in order]
            assert len({*costs}) > 2


@pytest.mark.parametrize("kind", KINDS)
def test_packed_documents_hold_the_tokens_and_the_mask_that_rendering_gave(kind: str) -> None:
    for number, stream in enumerate(KINDS[kind](2)):
        seen: Counter[int] = Counter()
        for _ in range(12):
            for batch in stream.next_step().microbatches:
                for start, end, name in zip(batch.cu_seqlens, batch.cu_seqlens[1:], batch.sample_ids, strict=False):
                    sample = Source({"step": 7, "stream": 7, "stream, unsorted": 5}.get(kind, 11)).again(int(name))
                    np.testing.assert_array_equal(batch.input_ids[start:end], sample.token_ids[:-1])
                    np.testing.assert_array_equal(batch.target_ids[start:end], sample.token_ids[1:])
                    np.testing.assert_array_equal(batch.loss_mask[start:end], sample.loss_mask[1:])
                    seen[int(name)] += 1
                borders = batch.cu_seqlens[len(batch.sample_ids) :]
                assert not batch.loss_mask[borders[0] :].any() and borders[-1] - borders[0] == batch.num_padding
        assert len(seen) > 12 and set(seen.values()) == {1}, f"rank {number} trains every draw once"


@pytest.mark.parametrize("kind", KINDS)
def test_steps_prepared_ahead_are_the_streams_own(kind: str) -> None:
    """Their states too: what was prepared and not taken is in none of them."""
    ahead, (direct,) = StepsAhead(KINDS[kind](1)[0]), KINDS[kind](1)
    for _ in range(9):
        got, expected = ahead.next_step(), direct.next_step()
        assert encoded(got) == encoded(expected) and got.state == expected.state
    ahead.close()


def test_an_error_ahead_is_raised_by_the_step_it_belongs_to() -> None:
    class Broken(Source):
        def read(self, draw: int) -> Sample | None:
            if draw == 5:
                raise DataError("rows:5: odd")
            return super().read(draw)

    ahead = StepsAhead(StepStream(Broken(9), 2, place(0, 1)))
    assert [draws_of(ahead.next_step().microbatches) for _ in range(2)] == [[0, 1], [2, 3]]
    with pytest.raises(DataError, match="rows:5"):
        ahead.next_step()
    ahead.close()


@pytest.mark.parametrize("kind", ["step", "stream"])
def test_rows_left_out_are_counted_and_a_pass_of_nothing_else_ends_the_run(kind: str) -> None:
    def make(left_out: Sequence[int]) -> SampleStream:
        if kind == "step":
            return step_streams(4, 3, 1, left_out)[0]
        return packed_streams(4, stream_config(), 1, left_out=left_out)[0]

    stream, num_bad = make([1, 3]), 0
    for _ in range(4):
        step = stream.next_step()
        num_bad += len(step.bad_rows)
        assert step.counts.bad == step.counts.rows[1] == num_bad and step.counts.rows[0] - num_bad in (0, 1)
    with pytest.raises(DataError, match=r"must have a row that can be trained, but 16 passes, 64 draws, were left out"):
        make([0, 1, 2, 3]).next_step()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_few_good_rows_among_many_do_not_end_a_run(num_ranks: int) -> None:
    """In orders that differ from pass to pass a good row may lie further away than a whole pass."""

    class Shuffled(Source):
        def read(self, draw: int) -> Sample | None:
            number, position = divmod(draw, self.pass_length)
            row = int(np.random.default_rng(number).permutation(self.pass_length)[position])
            return super().read(number * self.pass_length + row)

    streams = [
        PackedStream(Shuffled(5, [1, 2, 3, 4]), stream_config(1, 1), place(r, num_ranks), cost=attention_cost, seed=3)
        for r in range(num_ranks)
    ]
    assert all(taken_by([stream], 30)[0] for stream in streams)


def test_a_stream_refuses_conversations_that_have_become_longer() -> None:
    class Longer(Source):
        def __init__(self, num_rows: int) -> None:
            super().__init__(num_rows)
            self._sizes = np.minimum(self._sizes + 1, CAPACITY)

    for num_steps in range(1, 6):
        states = taken_by(packed_streams(9, stream_config(), 1), num_steps)[1]
        stream = PackedStream(Longer(9), stream_config(), place(0, 1), cost=attention_cost, seed=3)
        with pytest.raises(ConfigError, match="must resume with conversations as long as they were"):
            stream.load(states)


def test_a_stream_refuses_a_state_of_another_shape() -> None:
    states = taken_by(packed_streams(9, stream_config(), 1), 1)[1]
    with pytest.raises(ConfigError, match="size it had, 4, got 5"):
        packed_streams(9, stream_config(buffer=5), 1)[0].load(states)
    with pytest.raises(ConfigError, match="k it had, 3, got 2"):
        packed_streams(9, stream_config(open_bins=2), 1)[0].load(states)
