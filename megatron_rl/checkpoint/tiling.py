"""Boxes of one tensor: whether they hold every element exactly once, and which of them a box meets.

Both cost about as much as there are boxes; comparing pairs of them, as torch does, takes hours for a large model.
"""

import itertools
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from megatron_rl.checkpoint.boxes import Box

Element = tuple[int, ...]


def first_misfit(shape: Sequence[int], boxes: Iterable[Box]) -> tuple[Element, int] | None:
    """The first element, in row-major order, that boxes do not hold exactly once, and how often they do.

    One outside of shape must not be held at all. None when every element is held as it must be. How often a box holds
    an element, differenced along every axis, is zero but at the box's corners; a sum over boxes is the tensor if and
    only if that is so of the differences, and where they first differ the sum does.
    """
    whole: Box = tuple((0, size) for size in shape)
    signs = [(-1) ** sum(ends) for ends in itertools.product((0, 1), repeat=len(whole))]
    difference: Counter[Element] = Counter()
    for factor, box in itertools.chain([(-1, whole)], ((1, box) for box in boxes)):
        for corner, sign in zip(itertools.product(*((low, low + size) for low, size in box)), signs, strict=True):
            difference[corner] += factor * sign
    wrong = min((corner for corner, change in difference.items() if change), default=None)
    if wrong is None:
        return None
    inside = all(0 <= place < size for place, size in zip(wrong, shape, strict=True))
    return wrong, difference[wrong] + int(inside)


class BoxIndex:
    """Finds boxes by their place: those with the same extent on an axis are told apart by the next axis."""

    def __init__(self, boxes: Sequence[Box]) -> None:
        self._root = _Node(boxes, range(len(boxes)), 0, len(boxes[0]) if boxes else 0)

    def meeting(self, box: Box) -> Iterator[int]:
        """Numbers of the boxes that share an element with box."""
        return self._root.meeting(box, 0)


class _Node:
    """Boxes that are alike on all axes before one."""

    def __init__(self, boxes: Sequence[Box], numbers: Sequence[int], axis: int, num_axes: int) -> None:
        self._numbers = numbers if axis == num_axes else ()
        by_extent: dict[tuple[int, int], list[int]] = {}
        if axis < num_axes:
            for number in numbers:
                by_extent.setdefault(boxes[number][axis], []).append(number)
        self._extents = sorted(by_extent)
        self._longest = max((size for _, size in self._extents), default=0)
        self._next = [_Node(boxes, by_extent[extent], axis + 1, num_axes) for extent in self._extents]

    def meeting(self, box: Box, axis: int) -> Iterator[int]:
        yield from self._numbers
        if axis == len(box):
            return
        low, size = box[axis]
        first = bisect_left(self._extents, (low - self._longest + 1, 0))
        for place in range(first, len(self._extents)):
            start, length = self._extents[place]
            if start >= low + size:
                break
            if start + length > low:
                yield from self._next[place].meeting(box, axis + 1)
