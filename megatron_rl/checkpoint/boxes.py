"""Ranges of a flat tensor as rectangles of the tensor that it is."""

import itertools
import math
from collections.abc import Iterator, Sequence

Box = tuple[tuple[int, int], ...]
"""(offset, size) per axis."""


def dense_boxes(
    sizes: Sequence[int], strides: Sequence[int], first: int, start: int, end: int
) -> Iterator[tuple[Box, int]]:
    """Elements start..end of a flat tensor, as far as the region (sizes, strides, first element) holds them.

    Cut into boxes that are contiguous in the flat tensor: ((offset, size) per axis of the region, first flat element).
    """
    sizes, strides = list(sizes), list(strides)
    dense = list(itertools.accumulate(reversed(sizes[1:]), lambda a, b: a * b, initial=1))[::-1] if sizes else []
    low, high = max(start, first), min(end, first + math.prod(sizes))
    if strides == dense or not sizes:
        if low < high:
            yield from ((box, first + flat) for box, flat in _runs(sizes, low - first, high - first))
        return
    for index in range(sizes[0]):
        for box, flat in dense_boxes(sizes[1:], strides[1:], first + index * strides[0], start, end):
            yield ((index, 1), *box), flat


def _runs(sizes: Sequence[int], low: int, high: int) -> Iterator[tuple[Box, int]]:
    """Cuts elements low..high of a dense tensor into boxes: a part of a row, whole rows, a part of a row."""
    if not sizes:
        yield (), low
        return
    row = math.prod(sizes[1:])
    while low < high:
        index, inside = divmod(low, row)
        if inside == 0 and high - low >= row:
            count = (high - low) // row
            yield ((index, count), *((0, size) for size in sizes[1:])), low
            low += count * row
        else:
            stop = min(high, (index + 1) * row)
            for box, flat in _runs(sizes[1:], inside, stop - index * row):
                yield ((index, 1), *box), index * row + flat
            low = stop
