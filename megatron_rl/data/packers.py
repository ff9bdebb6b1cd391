"""Next-k-Fit and the classical packers it is measured against, behind one interface.

The baselines need all lengths before the first bin is done, and keep all bins open: bounds on what streaming loses.
"""

from collections.abc import Mapping
from typing import Protocol

import numpy as np

from megatron_rl.data.next_k_fit import check_sizes, checked_lengths, empty_tree


class Packer(Protocol):
    """Bin number of each document, int64 [documents]; bins are numbered from 0 in the order they were opened.

    open_bins is the k of a packer that streams; the others keep all open. ValueError for capacity or open_bins below 1,
    and for a length that is not in 0 to capacity.
    """

    def __call__(self, lengths: np.ndarray, capacity: int, *, open_bins: int) -> np.ndarray: ...


def _next_k_fit(lengths: np.ndarray, capacity: int, *, open_bins: int) -> np.ndarray:
    """To the first of open_bins open bins, oldest first, where it fits; else the oldest is closed."""
    from megatron_rl.data import pack_kernels

    check_sizes(capacity, open_bins)
    given = checked_lengths(lengths, capacity)
    numbers, bins = np.empty_like(given), np.zeros(2, dtype=np.int64)
    pack_kernels.next_k_fit(given, capacity, open_bins, empty_tree(open_bins), bins, numbers)
    return numbers


def _first_fit(lengths: np.ndarray, capacity: int, *, open_bins: int) -> np.ndarray:
    """To the first of all bins where it fits."""
    check_sizes(capacity, open_bins)
    return _next_k_fit(lengths, capacity, open_bins=max(1, len(lengths)))


def _first_fit_decreasing(lengths: np.ndarray, capacity: int, *, open_bins: int) -> np.ndarray:
    """The longest document first; equal ones as they came."""
    return _decreasing(_first_fit, lengths, capacity, open_bins)


def _best_fit(lengths: np.ndarray, capacity: int, *, open_bins: int) -> np.ndarray:
    """To the fullest of all bins where it fits; of equally full ones to the one that was last filled so far."""
    from megatron_rl.data import pack_kernels

    check_sizes(capacity, open_bins)
    given = checked_lengths(lengths, capacity)
    numbers = np.empty_like(given)
    pack_kernels.best_fit(given, capacity, empty_tree(capacity + 1), numbers)
    return numbers


def _best_fit_decreasing(lengths: np.ndarray, capacity: int, *, open_bins: int) -> np.ndarray:
    """The longest document first; equal ones as they came."""
    return _decreasing(_best_fit, lengths, capacity, open_bins)


def _decreasing(packer: Packer, lengths: np.ndarray, capacity: int, open_bins: int) -> np.ndarray:
    check_sizes(capacity, open_bins)
    given = checked_lengths(lengths, capacity)
    order = np.argsort(-given, kind="stable")
    numbers = np.empty_like(given)
    numbers[order] = packer(given[order], capacity, open_bins=open_bins)
    return numbers


PACKERS: Mapping[str, Packer] = {
    "next_k_fit": _next_k_fit,
    "first_fit": _first_fit,
    "first_fit_decreasing": _first_fit_decreasing,
    "best_fit_decreasing": _best_fit_decreasing,
}
"""Packers by name."""


def padding(numbers: np.ndarray, lengths: np.ndarray, capacity: int) -> float:
    """Share of the bins' positions that no document fills; 0 without documents."""
    positions = (int(numbers.max(initial=-1)) + 1) * capacity
    return 1 - int(np.asarray(lengths).sum()) / positions if positions else 0.0
