"""The documents of one packed sequence, laid out so that few kernel calls serve many short documents."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

MAX_PADDING_SHARE = 0.2
"""A bucket takes documents as long as padding stays below this share of its cells."""


@dataclass(frozen=True)
class Bucket:
    """Documents of similar length as one padded batch: cells first_cell ... + num_documents * length."""

    first_cell: int
    num_documents: int
    length: int


@dataclass(frozen=True)
class DocumentCells:
    """Where each packed token lies in the padded buckets, and back.

    token_of_cell: int64 [C], any token where a cell is padding; cell_of_token: int64 [T].
    Both are None when the cells are the tokens in their order (one bucket, no padding).
    """

    buckets: tuple[Bucket, ...]
    token_of_cell: Tensor | None = None
    cell_of_token: Tensor | None = None


@dataclass
class PackedDocuments(PackedSeqParams):
    """PackedSeqParams that also carries RoPE's tables and the buckets: computed once, used by every layer."""

    rope_cos: Tensor | None = None
    """[T, 1, head_dim / 2]"""
    rope_sin: Tensor | None = None
    """[T, 1, head_dim / 2]"""
    cells: DocumentCells = field(default_factory=lambda: DocumentCells(()))


def pack_documents(lengths: Sequence[int], *, head_dim: int, rope_base: float, dtype: torch.dtype) -> PackedDocuments:
    """Layout of consecutive documents of these lengths; empty ones are allowed and take no cell."""
    positions = document_positions(lengths)
    inverse_frequency = 1.0 / rope_base ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = torch.outer(positions.float(), inverse_frequency)[:, None]
    return PackedDocuments(
        qkv_format="sbhd",
        rope_cos=angles.cos().to(dtype),
        rope_sin=angles.sin().to(dtype),
        cells=document_cells(lengths),
    )


def document_positions(lengths: Sequence[int]) -> Tensor:
    """int64 [T]: 0, 1, ... restarting at each document."""
    counts = torch.tensor(lengths)
    starts = counts.cumsum(0) - counts
    return torch.arange(int(counts.sum())) - torch.repeat_interleave(starts, counts)


def document_cells(lengths: Sequence[int]) -> DocumentCells:
    """Sorts documents by length into padded buckets, the longest first."""
    starts, start = [], 0
    for length in lengths:
        starts.append(start)
        start += length
    num_tokens = start
    members = _bucket_members(lengths)
    buckets, first_cell = [], 0
    token_of_cell, cell_of_token = [], torch.empty(num_tokens, dtype=torch.int64)
    for documents in members:
        length = lengths[documents[0]]
        offsets = torch.arange(length)
        document_starts = torch.tensor([starts[d] for d in documents])
        tokens = document_starts[:, None] + offsets
        real = offsets < torch.tensor([lengths[d] for d in documents])[:, None]
        cells = first_cell + torch.arange(len(documents) * length).view(len(documents), length)
        cell_of_token[tokens[real]] = cells[real]
        token_of_cell.append(torch.where(real, tokens, document_starts[:, None]).flatten())
        buckets.append(Bucket(first_cell, len(documents), length))
        first_cell += len(documents) * length
    if len(buckets) == 1 and first_cell == num_tokens:
        return DocumentCells(tuple(buckets))
    return DocumentCells(tuple(buckets), torch.cat(token_of_cell), cell_of_token)


def _bucket_members(lengths: Sequence[int]) -> list[list[int]]:
    """Document numbers of each bucket, longest first; equal lengths keep their order."""
    members: list[list[int]] = []
    num_tokens = 0
    for document in sorted(range(len(lengths)), key=lambda d: -lengths[d]):
        if not lengths[document]:
            continue
        num_tokens += lengths[document]
        if members:
            cells = lengths[members[-1][0]] * (len(members[-1]) + 1)
            if cells - num_tokens <= MAX_PADDING_SHARE * cells:
                members[-1].append(document)
                continue
        members.append([document])
        num_tokens = lengths[document]
    return members
