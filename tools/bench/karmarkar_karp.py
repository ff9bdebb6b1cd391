"""Balancing a batch that is known as a whole, which ranks must first tell each other about."""

import heapq

import numpy as np


def partition(costs: np.ndarray, num_parts: int) -> np.ndarray:
    """Items of each part, all parts of the same number and about the same sum. int64 [num_parts, items / num_parts]

    The largest differencing method with equal counts: to begin with, num_parts items of neighbouring cost are one
    partition, an item in each part; then the two partitions whose parts differ most are merged, the dearest part of one
    with the cheapest of the other, until one is left. (Karmarkar and Karp 1982) num_parts divides the number of items.
    """
    order = np.argsort(-costs, kind="stable")
    heap = []
    for start in range(0, len(costs), num_parts):
        items = order[start : start + num_parts]
        heap.append(_entry(costs[items], items[:, None], start))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, number, sums, parts = heapq.heappop(heap)
        _, _, other_sums, other_parts = heapq.heappop(heap)
        merged = np.concatenate([parts, other_parts[::-1]], axis=1)
        heapq.heappush(heap, _entry(sums + other_sums[::-1], merged, number))
    return heap[0][3]


def _entry(sums: np.ndarray, parts: np.ndarray, number: int) -> tuple[float, int, np.ndarray, np.ndarray]:
    """A partition for the heap: the greatest difference first, ties by number; its parts from dear to cheap."""
    order = np.argsort(-sums, kind="stable")
    return float(sums.min() - sums.max()), number, sums[order], parts[order]
