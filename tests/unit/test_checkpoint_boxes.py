"""A range of a flat tensor, cut into boxes: together exactly the range, each contiguous, few of them."""

import itertools
import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.checkpoint.boxes import dense_boxes


@given(st.data())
def test_boxes_of_disjoint_ranges_cover_every_element_of_the_region_once(data: st.DataObject) -> None:
    """The region is a view such as gate or up of fused weights; the ranges are those of data-parallel ranks."""
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    flat = torch.arange(math.prod(shape) + 5)[5:].clone()
    region = flat.view(shape)
    axis = data.draw(st.integers(0, len(shape) - 1))
    low = data.draw(st.integers(0, shape[axis] - 1))
    region = region.narrow(axis, low, data.draw(st.integers(1, shape[axis] - low)))
    cuts = sorted({0, len(flat), *data.draw(st.lists(st.integers(0, len(flat)), max_size=4))})
    rebuilt = torch.full(region.shape, -1)
    for start, end in itertools.pairwise(cuts):
        shard = flat[start:end]
        for box, first in dense_boxes(region.shape, region.stride(), int(region.storage_offset()), start, end):
            sizes = [size for _, size in box]
            target = rebuilt[tuple(slice(low, low + size) for low, size in box)]
            assert bool((target == -1).all()), "no element twice"
            target.copy_(shard[first - start : first - start + math.prod(sizes)].view(sizes))
    assert torch.equal(rebuilt, region)


def test_a_range_of_a_matrix_is_at_most_three_boxes() -> None:
    boxes = list(dense_boxes((10, 8), (8, 1), 0, 5, 61))
    assert boxes == [(((0, 1), (5, 3)), 5), (((1, 6), (0, 8)), 8), (((7, 1), (0, 5)), 56)]
