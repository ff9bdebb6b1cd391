"""The SFT stream: every sample once per epoch, the same steps after a restart and for any number of ranks."""

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.config import ConfigError, DataError
from megatron_rl.data.sft import SftDataConfig
from megatron_rl.data.stream import SftStream
from megatron_rl.records import PackedBatch, Sample, StepBatch, wire


def make_samples(count: int) -> list[Sample]:
    sizes = np.random.default_rng(0).integers(2, 20, count)
    return [
        Sample(f"s{i}", np.arange(size, dtype=np.int32) + 100 * i, np.arange(size) > size // 2)
        for i, size in enumerate(sizes)
    ]


def make_stream(count: int, samples_per_step: int, *, seed: int = 3, data_parallel_size: int = 1) -> SftStream:
    config = SftDataConfig(train=["x"], samples_per_step=samples_per_step, microbatch_tokens=40)
    return SftStream(
        make_samples(count), config=config, seed=seed, data_parallel_size=data_parallel_size, pad_multiple=2, pad_id=9
    )


def batches_of(step: StepBatch) -> list[PackedBatch]:
    return [batch for rank in step.microbatches for batch in rank]


def ids_of(step: StepBatch) -> Counter[str]:
    return Counter(name for batch in batches_of(step) for name in batch.sample_ids)


@given(st.integers(1, 12), st.integers(1, 15), st.integers(1, 4))
def test_every_sample_occurs_once_per_epoch_and_rests_are_carried_over(
    count: int, samples_per_step: int, data_parallel_size: int
) -> None:
    stream = make_stream(count, samples_per_step, data_parallel_size=data_parallel_size)
    num_steps = 3 * count
    drawn = [ids_of(stream.next_step(step)) for step in range(num_steps)]
    assert all(ids.total() == samples_per_step for ids in drawn)
    assert sum(drawn, Counter()) == Counter({f"s{i}": 3 * samples_per_step for i in range(count)})
    so_far: Counter[str] = Counter()
    for ids in drawn:
        so_far += ids
        times = [so_far[f"s{i}"] for i in range(count)]
        assert max(times) - min(times) <= 1


@given(st.integers(1, 12), st.integers(1, 15), st.integers(0, 9), st.integers(1, 4))
def test_a_resumed_stream_gives_the_bytes_of_an_uninterrupted_one(
    count: int, samples_per_step: int, cut: int, data_parallel_size: int
) -> None:
    whole = make_stream(count, samples_per_step, data_parallel_size=data_parallel_size)
    first = make_stream(count, samples_per_step, data_parallel_size=data_parallel_size)
    for step in range(cut):
        assert wire.encode(whole.next_step(step)) == wire.encode(first.next_step(step))
    state = json.loads(json.dumps(first.state_dict()))
    second = make_stream(count, samples_per_step, data_parallel_size=data_parallel_size)
    second.next_step(0)
    second.load_state_dict(state)
    for step in range(cut, cut + 5):
        assert wire.encode(whole.next_step(step)) == wire.encode(second.next_step(step))


@given(st.integers(1, 12), st.integers(1, 15), st.integers(2, 4))
def test_samples_and_denominator_of_a_step_do_not_depend_on_the_number_of_ranks(
    count: int, samples_per_step: int, data_parallel_size: int
) -> None:
    one = make_stream(count, samples_per_step)
    many = make_stream(count, samples_per_step, data_parallel_size=data_parallel_size)
    num_trained = {f"s{i}": int(s.loss_mask.sum()) for i, s in enumerate(make_samples(count))}
    for step in range(5):
        expected, got = one.next_step(step), many.next_step(step)
        assert ids_of(expected) == ids_of(got) and got.step == step
        assert len(got.microbatches) == data_parallel_size and len({len(own) for own in got.microbatches}) == 1
        assert got.num_trained == sum(num_trained[name] * times for name, times in ids_of(got).items())
        assert got.num_trained == sum(b.num_trained for b in batches_of(got)) == expected.num_trained


def test_epochs_and_seeds_are_shuffled_differently() -> None:
    def order(seed: int) -> list[str]:
        stream = make_stream(20, 1, seed=seed)
        return [next(iter(ids_of(stream.next_step(step)))) for step in range(40)]

    first = order(3)
    assert first == order(3)
    assert sorted(first[:20]) == sorted(first[20:]) and len({*map(tuple, (first[:20], first[20:], order(4)[:20]))}) == 3


def test_a_stream_resumes_only_with_the_seed_and_data_it_started_with() -> None:
    state = make_stream(6, 2).state_dict()
    with pytest.raises(ConfigError, match=r"resume with the seed of its training data at the start, 3, got 4; restore"):
        make_stream(6, 2, seed=4).load_state_dict(state)
    with pytest.raises(ConfigError, match=r"resume with the num_samples .*, 6, got 7;"):
        make_stream(7, 2).load_state_dict(state)
    samples = make_samples(6)
    samples[4].loss_mask[1] ^= True
    config = SftDataConfig(train=["x"], samples_per_step=2, microbatch_tokens=40)
    other = SftStream(samples, config=config, seed=3, data_parallel_size=1)
    with pytest.raises(ConfigError, match=r"resume with the contents of its training data"):
        other.load_state_dict(state)
    other.load_state_dict({name: value for name, value in state.items() if name != "contents"})


def test_samples_that_can_never_be_drawn_are_refused_at_the_start() -> None:
    config = SftDataConfig(train=["x"], microbatch_tokens=5)
    with pytest.raises(DataError, match="at least one conversation, got none"):
        SftStream([], config=config, seed=0, data_parallel_size=1)
    with pytest.raises(DataError, match="must fill at most the 5 positions of a microbatch"):
        SftStream(make_samples(9), config=config, seed=0, data_parallel_size=1)
