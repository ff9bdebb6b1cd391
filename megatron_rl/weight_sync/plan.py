"""Where each HF-named tensor lies in the arena, and which trainer rank writes it."""

import heapq
import math
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from megatron_rl.records import TensorSlot

ALIGNMENT = 64
"""Bytes: a cache line, and at least the size of every element."""


class TensorSpec(Protocol):
    """Name, dtype (torch's name without the module) and shape of one tensor."""

    @property
    def name(self) -> str: ...

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> Sequence[int]: ...


def arena_layout(specs: Iterable[TensorSpec]) -> list[TensorSlot]:
    """Slots one after the other in the order given. ValueError for a name given twice or a dtype that torch lacks."""
    slots: list[TensorSlot] = []
    seen: set[str] = set()
    offset = 0
    for spec in specs:
        if spec.name in seen:
            raise ValueError(f"every tensor of a layout must have its own name, got {spec.name} twice")
        seen.add(spec.name)
        shape = tuple(int(size) for size in spec.shape)
        nbytes = math.prod(shape) * torch_dtype(spec.dtype).itemsize
        slots.append(TensorSlot(spec.name, spec.dtype, shape, offset, nbytes))
        offset = _aligned(offset + nbytes)
    return slots


def arena_nbytes(slots: Sequence[TensorSlot]) -> int:
    """Bytes of one half of the arena, a multiple of the alignment."""
    return _aligned(max((slot.offset + slot.nbytes for slot in slots), default=0))


def assign_owners(slots: Sequence[TensorSlot], ranks: Sequence[int]) -> dict[str, int]:
    """Name -> rank that writes it: largest first, each to the rank with the fewest bytes (Graham 1969).

    Deterministic. No rank gets more than 4/3 of the best possible maximum.
    """
    heap = [(0, rank) for rank in sorted(ranks)]
    owners: dict[str, int] = {}
    for slot in sorted(slots, key=lambda slot: (-slot.nbytes, slot.name)):
        load, rank = heapq.heappop(heap)
        owners[slot.name] = rank
        heapq.heappush(heap, (load + slot.nbytes, rank))
    return owners


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of that name; ValueError if torch has none."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"a dtype must be one of torch's by name, such as float32 or bfloat16, got {name!r}")
    return dtype


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
