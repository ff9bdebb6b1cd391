"""Samples to packed batches: whole documents end to end, shifted once here, spread evenly over data-parallel ranks."""

import heapq
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from msgspec.structs import replace

from megatron_rl.config import DataError
from megatron_rl.data.cost_buffer import CostSortedBuffer
from megatron_rl.data.next_k_fit import OPEN_BINS, NextKFit, next_k_fit
from megatron_rl.records import PackedBatch, Sample

__all__ = [
    "OPEN_BINS",
    "CostSortedBuffer",
    "NextKFit",
    "Oversized",
    "fit_document",
    "next_k_fit",
    "num_positions",
    "pack_for_ranks",
    "pack_samples",
]

Oversized = Literal["error", "truncate", "drop"]
"""What becomes of a document that fills more positions than a microbatch has."""

_OPTIONAL_STREAMS = {
    "advantages": (np.float32, 0.0),
    "engine_logp": (np.float32, np.nan),
    "weight_version": (np.int32, -1),
    "loss_weight": (np.float32, 0.0),
}
"""Stream -> (dtype, value on padding)."""


def pack_samples(
    samples: Sequence[Sample], *, capacity: int, pad_multiple: int = 1, pad_id: int = 0
) -> list[PackedBatch]:
    """Batches of at most capacity positions, a sample of n tokens filling n - 1, in Next-k-Fit order.

    Each batch is padded to a multiple of pad_multiple (the tensor-parallel size); that exceeds capacity only where
    capacity is not such a multiple. DataError as in num_positions.
    """
    lengths = num_positions(samples, capacity=capacity)
    return [
        _pack([samples[i] for i in members], pad_multiple=pad_multiple, pad_id=pad_id)
        for members in next_k_fit(lengths, capacity, OPEN_BINS)
    ]


def pack_for_ranks(
    samples: Sequence[Sample], *, capacity: int, data_parallel_size: int, pad_multiple: int = 1, pad_id: int = 0
) -> list[list[PackedBatch]]:
    """[rank][microbatch]: similar positions per rank, the same number of microbatches on each.

    Longest sample first to the rank with the fewest positions so far; the same samples always give the same batches.
    A rank that needs fewer microbatches than the others gets untrained ones of pad_multiple padding tokens.
    """
    lengths = num_positions(samples, capacity=capacity)
    loads = [(0, rank) for rank in range(data_parallel_size)]
    of_rank: list[list[Sample]] = [[] for _ in range(data_parallel_size)]
    for index in sorted(range(len(samples)), key=lambda i: (-lengths[i], i)):
        load, rank = heapq.heappop(loads)
        of_rank[rank].append(samples[index])
        heapq.heappush(loads, (load + lengths[index], rank))
    ranks = [pack_samples(own, capacity=capacity, pad_multiple=pad_multiple, pad_id=pad_id) for own in of_rank]
    return _same_count(ranks, pad_multiple=pad_multiple, pad_id=pad_id)


def num_positions(samples: Sequence[Sample], *, capacity: int) -> list[int]:
    """Positions that each sample fills; DataError names one that fits no microbatch or has no token to predict."""
    lengths = [len(sample.token_ids) - 1 for sample in samples]
    for sample, length in zip(samples, lengths, strict=True):
        if length < 1:
            raise DataError(f"sample {sample.sample_id} must have at least 2 tokens, got {length + 1}; remove it")
        if length > capacity:
            raise DataError(
                f"sample {sample.sample_id} must fill at most the {capacity} positions of a microbatch, got {length}; "
                f"shorten it or raise microbatch_tokens"
            )
    return lengths


def fit_document(sample: Sample, *, capacity: int, oversized: Oversized) -> Sample | None:
    """The sample if it fills at most capacity positions; else its first capacity + 1 tokens, None, or DataError.

    A truncated sample without a token left to train is dropped too. DataError as well for less than two tokens.
    """
    if oversized == "error" or len(sample.token_ids) - 1 <= capacity:
        num_positions([sample], capacity=capacity)
        return sample
    if oversized == "drop" or not sample.loss_mask[: capacity + 1].any():
        return None
    streams = ("token_ids", "loss_mask", "loss_weight", *_OPTIONAL_STREAMS)
    given = {name: stream for name in streams if (stream := getattr(sample, name)) is not None}
    return replace(sample, **{name: stream[: capacity + 1] for name, stream in given.items()})


def _same_count(ranks: list[list[PackedBatch]], *, pad_multiple: int, pad_id: int) -> list[list[PackedBatch]]:
    count = max(len(own) for own in ranks)
    if not count:
        return ranks
    example = next(batch for own in ranks for batch in own)
    filler = _padding(example, pad_multiple, pad_id)
    return [own + [filler] * (count - len(own)) for own in ranks]


def _padding(example: PackedBatch, num_padding: int, pad_id: int) -> PackedBatch:
    """A batch that is nothing but one padding document, with the streams that the example has."""
    optional: dict[str, Any] = {
        name: np.full(num_padding, value, dtype=dtype)
        for name, (dtype, value) in _OPTIONAL_STREAMS.items()
        if getattr(example, name) is not None
    }
    return PackedBatch(
        input_ids=np.full(num_padding, pad_id, dtype=np.int32),
        target_ids=np.full(num_padding, pad_id, dtype=np.int32),
        loss_mask=np.zeros(num_padding, dtype=bool),
        cu_seqlens=np.array([0, num_padding], dtype=np.int32),
        sample_ids=[],
        num_padding=num_padding,
        **optional,
    )


def _pack(samples: Sequence[Sample], *, pad_multiple: int, pad_id: int) -> PackedBatch:
    """One batch of these samples, shifted and padded."""
    lengths = [len(sample.token_ids) - 1 for sample in samples]
    num_padding = -sum(lengths) % pad_multiple

    def joined(parts: list[np.ndarray], dtype: type, on_padding: float) -> np.ndarray:
        padding = np.full(num_padding, on_padding, dtype=dtype)
        return np.concatenate([*parts, padding], dtype=dtype, casting="same_kind")

    loss_mask = joined([sample.loss_mask[1:] for sample in samples], np.bool_, False)
    optional: dict[str, Any] = {}
    for name, (dtype, on_padding) in _OPTIONAL_STREAMS.items():
        streams = [getattr(sample, name) for sample in samples]
        given = [stream[1:] for stream in streams if stream is not None]
        if not given:
            continue
        if len(given) < len(streams):
            missing = next(s.sample_id for s, stream in zip(samples, streams, strict=True) if stream is None)
            raise ValueError(f"either every sample of a batch has {name} or none has, got none for {missing}")
        optional[name] = joined(given, dtype, on_padding)
    if "engine_logp" in optional:
        optional["engine_logp"][~loss_mask] = np.nan
    return PackedBatch(
        input_ids=joined([sample.token_ids[:-1] for sample in samples], np.int32, pad_id),
        target_ids=joined([sample.token_ids[1:] for sample in samples], np.int32, pad_id),
        loss_mask=loss_mask,
        cu_seqlens=np.cumsum([0, *lengths, *([num_padding] if num_padding else [])], dtype=np.int32),
        sample_ids=[sample.sample_id for sample in samples],
        num_padding=num_padding,
        info=[sample.info for sample in samples],
        **optional,
    )
