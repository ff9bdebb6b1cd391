"""Packing: every document once, nothing over capacity, shifted once, spread evenly."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.config import DataError
from megatron_rl.data.packing import Oversized, fit_document, next_k_fit, pack_for_ranks, pack_samples
from megatron_rl.records import PackedBatch, Sample

CAPACITY = 40


def sample(number: int, num_tokens: int, *, rl: bool = False) -> Sample:
    """Every token and every stream value tells which token of which sample it belongs to."""
    tokens = np.arange(num_tokens, dtype=np.int32) + 1000 * (number + 1)
    mask = np.random.default_rng(number).random(num_tokens) < 0.5
    mask[0] = False
    streams = {}
    if rl:
        logp = np.where(tokens % 7 == 0, np.nan, -tokens / 1e3)
        streams = {"advantages": tokens / 1e3, "engine_logp": logp, "weight_version": tokens}
        streams = {name: s.astype(np.int32 if name == "weight_version" else np.float32) for name, s in streams.items()}
    return Sample(f"s{number}", tokens, mask, info={"number": number}, **streams)


def samples(sizes: list[int], *, rl: bool = False) -> list[Sample]:
    return [sample(number, size, rl=rl) for number, size in enumerate(sizes)]


SIZES = st.lists(st.integers(2, CAPACITY + 1), min_size=1, max_size=30)


def trained_pairs(batches: list[PackedBatch]) -> Counter[tuple[int, int]]:
    return Counter(
        (int(i), int(t))
        for b in batches
        for i, t in zip(b.input_ids[b.loss_mask], b.target_ids[b.loss_mask], strict=True)
    )


@given(SIZES)
def test_batches_are_the_bins_of_next_k_fit(sizes: list[int]) -> None:
    batches = pack_samples(samples(sizes), capacity=CAPACITY)
    bins = next_k_fit([size - 1 for size in sizes], CAPACITY, 256)
    assert [batch.sample_ids for batch in batches] == [[f"s{number}" for number in members] for members in bins]


@given(SIZES, st.sampled_from([1, 2, 4]), st.booleans())
def test_a_packed_document_is_its_sample_shifted_by_one(sizes: list[int], pad_multiple: int, rl: bool) -> None:
    given_samples = {s.sample_id: s for s in samples(sizes, rl=rl)}
    batches = pack_samples(list(given_samples.values()), capacity=CAPACITY, pad_multiple=pad_multiple, pad_id=5)
    assert sorted(name for b in batches for name in b.sample_ids) == sorted(given_samples)
    for batch in batches:
        assert batch.num_tokens % pad_multiple == 0 and batch.num_tokens <= CAPACITY
        assert batch.num_padding < pad_multiple
        assert len(batch.cu_seqlens) == len(batch.sample_ids) + 1 + (batch.num_padding > 0)
        borders = batch.cu_seqlens
        assert (borders[0], borders[-1]) == (0, batch.num_tokens) and (np.diff(borders) > 0).all()
        for name, info, start, end in zip(batch.sample_ids, batch.info, borders[:-1], borders[1:], strict=False):
            source = given_samples[name]
            assert info is source.info
            np.testing.assert_array_equal(batch.input_ids[start:end], source.token_ids[:-1])
            np.testing.assert_array_equal(batch.target_ids[start:end], source.token_ids[1:])
            np.testing.assert_array_equal(batch.loss_mask[start:end], source.loss_mask[1:])
            if rl:
                assert batch.engine_logp is not None and source.engine_logp is not None
                assert batch.advantages is not None and source.advantages is not None
                assert batch.weight_version is not None and source.weight_version is not None
                known = np.where(source.loss_mask[1:], source.engine_logp[1:], np.nan)
                np.testing.assert_array_equal(batch.engine_logp[start:end], known)
                np.testing.assert_array_equal(batch.advantages[start:end], source.advantages[1:])
                np.testing.assert_array_equal(batch.weight_version[start:end], source.weight_version[1:])


@given(SIZES, st.integers(1, 5), st.sampled_from([1, 2, 4]))
def test_packing_keeps_the_trained_set(sizes: list[int], data_parallel_size: int, pad_multiple: int) -> None:
    given_samples = samples(sizes)
    expected = Counter(
        (int(s.token_ids[t - 1]), int(s.token_ids[t])) for s in given_samples for t in np.flatnonzero(s.loss_mask)
    )
    packed = pack_samples(given_samples, capacity=CAPACITY, pad_multiple=pad_multiple)
    assert trained_pairs(packed) == expected
    ranks = pack_for_ranks(
        given_samples, capacity=CAPACITY, data_parallel_size=data_parallel_size, pad_multiple=pad_multiple
    )
    assert trained_pairs([batch for own in ranks for batch in own]) == expected
    assert len(ranks) == data_parallel_size and len({len(own) for own in ranks}) == 1
    assert all(batch.num_tokens <= CAPACITY for own in ranks for batch in own)


@given(SIZES, st.integers(1, 5))
def test_ranks_differ_by_at_most_one_sample(sizes: list[int], data_parallel_size: int) -> None:
    ranks = pack_for_ranks(samples(sizes), capacity=CAPACITY, data_parallel_size=data_parallel_size)
    loads = [sum(b.num_tokens - b.num_padding for b in own) for own in ranks]
    assert max(loads) - min(loads) <= max(sizes) - 1


def test_the_longest_samples_are_placed_first() -> None:
    ranks = pack_for_ranks(samples([11, 11, 21]), capacity=CAPACITY, data_parallel_size=2)
    assert [[batch.sample_ids for batch in own] for own in ranks] == [[["s2"]], [["s0", "s1"]]]


def test_a_rank_without_work_gets_padding_that_trains_nothing() -> None:
    ranks = pack_for_ranks(samples([9], rl=True), capacity=CAPACITY, data_parallel_size=2, pad_multiple=4, pad_id=5)
    (filler,) = ranks[1]
    assert filler.num_tokens == filler.num_padding == 4 and filler.num_trained == 0
    assert filler.sample_ids == [] and filler.info == [] and filler.cu_seqlens.tolist() == [0, 4]
    assert filler.input_ids.tolist() == filler.target_ids.tolist() == [5] * 4
    for batch in (filler, pack_samples(samples([4], rl=True), capacity=CAPACITY, pad_multiple=4, pad_id=5)[0]):
        padding = slice(batch.num_tokens - batch.num_padding, None)
        assert batch.engine_logp is not None and np.isnan(batch.engine_logp[padding]).all()
        assert batch.advantages is not None and (batch.advantages[padding] == 0).all()
        assert batch.weight_version is not None and (batch.weight_version[padding] == -1).all()
        assert not batch.loss_mask[padding].any() and (batch.target_ids[padding] == 5).all()
        dtypes = [s.dtype for s in (batch.input_ids, batch.cu_seqlens, batch.weight_version, batch.engine_logp)]
        assert dtypes == [np.int32, np.int32, np.int32, np.float32]


def test_nothing_to_pack_gives_every_rank_nothing() -> None:
    assert pack_for_ranks([], capacity=CAPACITY, data_parallel_size=2) == [[], []]


def test_samples_that_fit_no_microbatch_are_named() -> None:
    with pytest.raises(DataError, match="sample s1 must fill at most the 40 positions of a microbatch, got 41"):
        pack_samples(samples([5, CAPACITY + 2]), capacity=CAPACITY)
    with pytest.raises(DataError, match="sample s0 must have at least 2 tokens, got 1"):
        pack_for_ranks(samples([1, 5]), capacity=CAPACITY, data_parallel_size=2)


@pytest.mark.parametrize("oversized", ["error", "truncate", "drop"])
def test_a_document_that_fits_is_left_as_it_is(oversized: Oversized) -> None:
    whole = sample(0, CAPACITY + 1, rl=True)
    assert fit_document(whole, capacity=CAPACITY, oversized=oversized) is whole
    with pytest.raises(DataError, match="sample s1 must have at least 2 tokens, got 1"):
        fit_document(sample(1, 1), capacity=CAPACITY, oversized=oversized)


def test_an_oversized_document_is_refused_or_cut_or_dropped() -> None:
    long = sample(3, CAPACITY + 9, rl=True)
    with pytest.raises(DataError, match="sample s3 must fill at most the 40 positions of a microbatch, got 48"):
        fit_document(long, capacity=CAPACITY, oversized="error")
    assert fit_document(long, capacity=CAPACITY, oversized="drop") is None
    cut = fit_document(long, capacity=CAPACITY, oversized="truncate")
    assert cut is not None and (cut.sample_id, cut.info) == ("s3", {"number": 3})
    for name in ("token_ids", "loss_mask", "advantages", "engine_logp", "weight_version"):
        np.testing.assert_array_equal(getattr(cut, name), getattr(long, name)[: CAPACITY + 1])
    assert cut.loss_weight is None and len(long.token_ids) == CAPACITY + 9
    (batch,) = pack_samples([cut], capacity=CAPACITY)
    assert batch.num_tokens == CAPACITY
    at_the_end = Sample("s4", long.token_ids, np.arange(CAPACITY + 9) > CAPACITY)
    assert fit_document(at_the_end, capacity=CAPACITY, oversized="truncate") is None


def test_a_stream_is_given_for_all_samples_or_for_none() -> None:
    mixed = [sample(0, 5, rl=True), sample(1, 5)]
    with pytest.raises(ValueError, match="every sample of a batch has advantages or none has, got none for s1"):
        pack_samples(mixed, capacity=CAPACITY)
