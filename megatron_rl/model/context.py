"""Context parallelism: which tokens of a packed batch a rank computes.

Every document is padded to a multiple of 2 C and cut into 2 C chunks of equal length; of C ranks, rank r takes chunks r
and 2 C - 1 - r of each, so that causal attention costs every rank the same. It is the order that Transformer Engine
uses for packed sequences. (Llama 3, Dubey et al. 2024, section 3.3.2)
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from megatron_rl.model.packed import document_positions


@dataclass(frozen=True)
class ContextShard:
    """One rank's tokens. T counts the given batch, P the padded one; P / C and T_local are the same."""

    lengths: tuple[int, ...]
    """Tokens of each padded document, those of a last one that fills the batch up included."""
    of_rank: Tensor
    """int64 [C, T_local]: places in the padded batch of every rank's tokens, in their order."""
    source: Tensor
    """int64 [P]: place in the given batch, 0 on padding."""
    is_padding: Tensor
    """bool [P]"""
    place_of_token: Tensor
    """int64 [T]: place in the concatenation of all ranks' tokens."""


@lru_cache(maxsize=16)
def context_shard(lengths: tuple[int, ...], *, context_size: int, tensor_size: int) -> ContextShard:
    """The cut of documents of these lengths. A rank's tokens are a multiple of tensor_size."""
    unit = 2 * context_size
    padded = [-(-length // unit) * unit for length in lengths]
    if missing := -sum(padded) % (unit * tensor_size):
        padded.append(missing)
    counts = torch.tensor(padded)
    positions = document_positions(padded)
    chunk = torch.repeat_interleave(counts // unit, counts)
    number = positions // chunk
    owner = torch.minimum(number, unit - 1 - number)
    of_rank = owner.argsort(stable=True).view(context_size, -1)
    real = torch.zeros_like(counts)
    real[: len(lengths)] = torch.tensor(lengths)
    is_padding = positions >= torch.repeat_interleave(real, counts)
    source = torch.zeros_like(positions)
    source[~is_padding] = torch.arange(int(real.sum()))
    place = torch.empty_like(positions)
    place[of_rank.flatten()] = torch.arange(len(positions))
    return ContextShard(tuple(padded), of_rank, source, is_padding, place[~is_padding])
