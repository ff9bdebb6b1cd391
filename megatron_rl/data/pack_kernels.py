"""Compiled inner loops of the packers. Imports numba, so it is imported where a packer first packs.

All arrays are int64. A tree is a max-tree in an array of 2 n entries: leaf i is entry n + i, the parent of entry j is
j // 2, and n is a power of two; leaves without a bin hold NO_BIN.
"""

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

NO_BIN = -1
"""Room of a leaf that holds no bin: less than the shortest document, which has 0 tokens."""


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Machine code kept on disk for the next process, or compiled anew where no folder for it can be written."""
    try:
        return numba.njit(cache=True)(function)
    except RuntimeError:
        return numba.njit(function)


@_compiled
def set_leaf(tree: np.ndarray, leaf: int, value: int) -> None:
    """Stores value and renews the maxima above it, up to the first that stays."""
    node = len(tree) // 2 + leaf
    tree[node] = value
    while node > 1:
        node //= 2
        greatest = max(tree[2 * node], tree[2 * node + 1])
        if tree[node] == greatest:
            return
        tree[node] = greatest


@_compiled
def _first_leaf(tree: np.ndarray, start: int, least: int) -> int:
    """The first leaf from start onwards whose value is at least least, or -1. O(log n)."""
    num_leaves = len(tree) // 2
    node = num_leaves + start
    while tree[node] < least:
        while node & 1:  # a right child: what follows it hangs further up
            node //= 2
        if node == 0:
            return -1
        node += 1
    while node < num_leaves:
        node *= 2
        if tree[node] < least:
            node += 1
    return node - num_leaves


@_compiled
def next_k_fit(
    lengths: np.ndarray, capacity: int, num_open: int, tree: np.ndarray, bins: np.ndarray, numbers: np.ndarray
) -> None:
    """Bin of each document into numbers; tree and bins are the packer's state and are brought up to date.

    Bin b lies in leaf b % num_open while it is open. bins is (oldest open bin, bins opened so far).
    """
    for document in range(len(lengths)):
        length = lengths[document]
        oldest, opened = bins[0], bins[1]
        first = oldest % num_open
        leaf = _first_leaf(tree, first, length)
        if leaf < 0 and first > 0:
            leaf = _first_leaf(tree, 0, length)
        if leaf < 0:
            if opened - oldest == num_open:
                bins[0] = oldest + 1
            bins[1] = opened + 1
            leaf = opened % num_open
            number, room = opened, capacity
        else:
            number = oldest + (leaf - first) % num_open
            room = tree[len(tree) // 2 + leaf]
        set_leaf(tree, leaf, room - length)
        numbers[document] = number


@_compiled
def best_fit(lengths: np.ndarray, capacity: int, tree: np.ndarray, numbers: np.ndarray) -> None:
    """Bin of each document into numbers: the fullest that holds it.

    tree has a leaf for each room 0 to capacity, at the start NO_BIN; it holds 0 where some bin has that room. Of bins
    with equal room the one that got there last is taken.
    """
    latest = np.full(capacity + 1, NO_BIN, dtype=np.int64)
    before = np.full(len(lengths), NO_BIN, dtype=np.int64)
    num_bins = 0
    for document in range(len(lengths)):
        length = lengths[document]
        room = _first_leaf(tree, length, 0)
        if room < 0:
            number, room = num_bins, capacity
            num_bins += 1
        else:
            number = latest[room]
            latest[room] = before[number]
            if latest[room] == NO_BIN:
                set_leaf(tree, room, NO_BIN)
        left = room - length
        if latest[left] == NO_BIN:
            set_leaf(tree, left, 0)
        before[number] = latest[left]
        latest[left] = number
        numbers[document] = number


@_compiled
def grouped(numbers: np.ndarray, first: int, starts: np.ndarray, order: np.ndarray) -> None:
    """Documents ordered by bin, in each bin as they came, into order, by a counting sort.

    Bin first + i is order[starts[i] : starts[i + 1]]; starts, one entry longer than there are bins, is zero on entry.
    """
    for document in range(len(numbers)):
        starts[numbers[document] - first + 1] += 1
    for number in range(1, len(starts)):
        starts[number] += starts[number - 1]
    filled = starts[:-1].copy()
    for document in range(len(numbers)):
        number = numbers[document] - first
        order[filled[number]] = document
        filled[number] += 1
