"""Next-k-Fit: whole documents to bins of one capacity, of which k are open at a time. One pass, memory of k bins."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Generic, TypeVar, cast

import numpy as np

from megatron_rl.config import ConfigError

OPEN_BINS = 256
"""Bins that may still take a document. On a log-normal mix padding falls to .01% at 256, from 13% at 1."""

Item = TypeVar("Item")


class NextKFit(Generic[Item]):
    """A document goes to the first open bin (oldest first) where it fits; if none fits, the oldest of k open bins is
    closed and a new one opened.

    What comes later never moves an earlier document, so any cut of the stream into calls gives the same bins. A
    document costs O(log k). ValueError for capacity or k below 1.
    """

    def __init__(self, capacity: int, k: int = OPEN_BINS) -> None:
        check_sizes(capacity, k)
        self.capacity, self.k = capacity, k
        self._clear()

    def add(self, length: int, item: Item) -> list[Item] | None:
        """Places one document; the items of the bin that had to be closed for it, None if there was none."""
        closed = self.add_many([length], [item])
        return closed[0] if closed else None

    def add_many(self, lengths: Sequence[int] | np.ndarray, items: Sequence[Item] | np.ndarray) -> list[list[Item]]:
        """Places documents in this order; the items of the bins that were closed, in the order they were opened.

        An array of items is stored as plain numbers. ValueError for a length that is not in 0 to capacity; nothing is
        placed then.
        """
        from megatron_rl.data import pack_kernels

        given = checked_lengths(lengths, self.capacity)
        if len(given) != len(items):
            raise ValueError(f"every document must have one item, got {len(given)} lengths and {len(items)} items")
        first, numbers = int(self._bins[0]), np.empty_like(given)
        pack_kernels.next_k_fit(given, self.capacity, self.k, self._tree, self._bins, numbers)
        oldest, opened = self._bins.tolist()
        added = _items_by_bin(items, numbers, first, opened - first)
        for own, more in zip(self._items, added, strict=False):
            own += more
        self._items += added[len(self._items) :]
        closed, self._items = self._items[: oldest - first], self._items[oldest - first :]
        return closed

    def flush(self) -> list[list[Item]]:
        """Closes all open bins; their items, in the order the bins were opened."""
        left = self._items
        self._clear()
        return left

    @property
    def open_items(self) -> list[list[Item]]:
        """Items of the open bins, oldest first."""
        return [list(items) for items in self._items]

    def state_dict(self) -> dict[str, Any]:
        """The open bins, oldest first, as plain data if the items are."""
        oldest, leaves = int(self._bins[0]), len(self._tree) // 2
        rooms = [int(self._tree[leaves + (oldest + i) % self.k]) for i in range(len(self._items))]
        return {"capacity": self.capacity, "k": self.k, "rooms": rooms, "items": self.open_items}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues exactly where the state was taken. ConfigError for another capacity or k."""
        for name, own in (("capacity", self.capacity), ("k", self.k)):
            if state[name] != own:
                raise ConfigError(
                    f"a packer must resume with the {name} it had, {state[name]}, got {own}; "
                    "restore the setting, or start in a new run folder"
                )
        from megatron_rl.data import pack_kernels

        self._clear()
        self._items = [list(items) for items in state["items"]]
        self._bins[1] = len(self._items)
        for leaf, room in enumerate(state["rooms"]):
            pack_kernels.set_leaf(self._tree, leaf, room)

    def _clear(self) -> None:
        self._items: list[list[Item]] = []
        self._tree = empty_tree(self.k)
        self._bins = np.zeros(2, dtype=np.int64)
        """(number of the oldest open bin, bins opened so far)"""


def next_k_fit(lengths: Sequence[int] | np.ndarray, capacity: int, k: int) -> list[list[int]]:
    """Document numbers of each bin, bins in the order they were opened. See NextKFit; ValueError as there."""
    packer: NextKFit[int] = NextKFit(capacity, k)
    return packer.add_many(lengths, np.arange(len(lengths))) + packer.flush()


def _items_by_bin(items: Sequence[Any] | np.ndarray, numbers: np.ndarray, first: int, num_bins: int) -> list[list[Any]]:
    """Items of bins first to first + num_bins - 1, in each bin as they came; numbers int64 [items]."""
    from megatron_rl.data import pack_kernels

    starts, order = np.zeros(num_bins + 1, dtype=np.int64), np.empty_like(numbers)
    pack_kernels.grouped(numbers, first, starts, order)
    ordered = items[order].tolist() if isinstance(items, np.ndarray) else [items[i] for i in order.tolist()]
    return [ordered[start:end] for start, end in pairwise(starts.tolist())]


def empty_tree(num_leaves: int) -> np.ndarray:
    """A max-tree (pack_kernels) without any bin. int64 [2 n], n the least power of two with room for the leaves."""
    return np.full(2 << (num_leaves - 1).bit_length(), -1, dtype=np.int64)


def check_sizes(capacity: int, k: int) -> None:
    """ValueError for a capacity or a number of open bins below 1."""
    if capacity < 1:
        raise ValueError(f"capacity must be at least 1 token, got {capacity}")
    if k < 1:
        raise ValueError(f"k must be at least 1 open bin, got {k}")


def checked_lengths(lengths: Sequence[int] | np.ndarray, capacity: int) -> np.ndarray:
    """The lengths as int64 [documents]; ValueError names the first that is not in 0 to capacity."""
    given = np.ascontiguousarray(lengths, dtype=np.int64)
    wrong = (given < 0) | (given > capacity)
    if wrong.any():
        document = int(wrong.argmax())
        raise ValueError(f"document {document} must have 0 to {capacity} tokens, got {given[document]}")
    return cast(np.ndarray, given)
