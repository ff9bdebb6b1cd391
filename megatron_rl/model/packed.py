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


@dataclass(frozen=True)
class ContextBucket:
    """Documents of similar length whose queries are this rank's tokens and whose keys are all tokens.

    queries: int64 [D, Q], numbers of this rank's tokens; keys: int64 [D, K], places among the tokens of all ranks; any
    token where a cell is padding. visible: bool [D, 1, Q, K], the earlier tokens of the same document.
    """

    queries: Tensor
    keys: Tensor
    visible: Tensor


@dataclass(frozen=True)
class ContextCells:
    """The buckets of a context-parallel rank; cell_of_token: int64 [T_local], among the queries of all buckets."""

    buckets: tuple[ContextBucket, ...]
    cell_of_token: Tensor


@dataclass
class PackedDocuments(PackedSeqParams):
    """PackedSeqParams that also carries RoPE's tables and the buckets: computed once, used by every layer."""

    rope_cos: Tensor | None = None
    """[T, 1, rotary_dim / 2], T of this rank"""
    rope_sin: Tensor | None = None
    """[T, 1, rotary_dim / 2]"""
    cells: DocumentCells = field(default_factory=lambda: DocumentCells(()))
    """Without context parallelism."""
    context: ContextCells | None = None
    """With it."""


def pack_documents(
    lengths: Sequence[int], *, rotary_dim: int, rope_base: float, dtype: torch.dtype, positions: Tensor | None = None
) -> PackedDocuments:
    """Layout of consecutive documents of these lengths; empty ones are allowed and take no cell.

    positions: int64 [T_local] in their documents, of the tokens that a context-parallel rank computes.
    """
    whole = positions is None
    if positions is None:
        positions = document_positions(lengths)
    inverse_frequency = 1.0 / rope_base ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)
    angles = torch.outer(positions.float(), inverse_frequency)[:, None]
    return PackedDocuments(
        qkv_format="sbhd",
        rope_cos=angles.cos().to(dtype),
        rope_sin=angles.sin().to(dtype),
        cells=document_cells(lengths) if whole else DocumentCells(()),
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


def context_cells(lengths: Sequence[int], of_rank: Tensor, rank: int) -> ContextCells:
    """Buckets of rank's tokens of documents of these padded lengths; of_rank as in ContextShard."""
    context_size = len(of_rank)
    place = torch.empty(of_rank.numel(), dtype=torch.int64)
    place[of_rank.flatten()] = torch.arange(of_rank.numel())
    positions = document_positions(lengths)[of_rank[rank]]
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    buckets, cell_of_token, first_cell = [], torch.empty(len(positions), dtype=torch.int64), 0
    for documents in _bucket_members(lengths):
        counts = torch.tensor([lengths[d] for d in documents])[:, None]
        first = torch.tensor([starts[d] for d in documents])[:, None]
        key, query = torch.arange(int(counts.max())), torch.arange(int(counts.max()) // context_size)
        queries = torch.where(query < counts // context_size, first // context_size + query, first // context_size)
        keys = place[torch.where(key < counts, first + key, first)]
        # The first token of the document stands in for padding: as a query it sees one key, as a key nobody's cell.
        at = torch.where(query < counts // context_size, positions[queries], 0)
        visible = (key <= at[:, :, None]) & (key < counts[:, :, None])
        real = (query < counts // context_size).flatten()
        cell_of_token[queries.flatten()[real]] = first_cell + torch.arange(queries.numel())[real]
        first_cell += queries.numel()
        buckets.append(ContextBucket(queries, keys, visible[:, None]))
    return ContextCells(tuple(buckets), cell_of_token)


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
