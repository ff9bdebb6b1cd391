"""Boxes of a tensor: each element held once or the first that is not is named; few boxes are looked at."""

import itertools
import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import Metadata

from megatron_rl.checkpoint.boxes import Box
from megatron_rl.checkpoint.pieces import Piece
from megatron_rl.checkpoint.tiling import BoxIndex, first_misfit
from megatron_rl.checkpoint.torch_dist import PieceReader, _PiecePlanner


def cut(box: Box, draw: Callable[..., Any], depth: int) -> list[Box]:
    """The box in up to 2 ** depth parts, none of them in line with another by design."""
    axis = draw(st.integers(0, len(box) - 1))
    low, size = box[axis]
    if depth == 0 or size < 2:
        return [box]
    first = draw(st.integers(1, size - 1))
    halves = [(low, first), (low + first, size - first)]
    return [part for half in halves for part in cut((*box[:axis], half, *box[axis + 1 :]), draw, depth - 1)]


def counts(shape: tuple[int, ...], boxes: list[Box]) -> np.ndarray:
    """How often each element is held; boxes reach at most one element out of the tensor, at its end."""
    held = np.zeros([size + 1 for size in shape], dtype=int)
    for box in boxes:
        held[tuple(slice(low, low + size) for low, size in box)] += 1
    return held


@given(st.data())
def test_the_first_element_that_is_missing_or_held_twice_is_named(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    boxes = cut(tuple((0, size) for size in shape), data.draw, 4)
    assert first_misfit(shape, boxes) is None
    number, axis = data.draw(st.integers(0, len(boxes) - 1)), data.draw(st.integers(0, len(shape) - 1))
    low, size = boxes[number][axis]
    moved = (*boxes[number][:axis], (low + 1, size), *boxes[number][axis + 1 :])
    for damaged in (boxes[:number] + boxes[number + 1 :], [*boxes, boxes[number]], [*boxes, moved]):
        held = counts(shape, damaged)
        expected = counts(shape, [tuple((0, size) for size in shape)])
        first = tuple(int(place) for place in np.argwhere(held != expected)[0])
        assert first_misfit(shape, damaged) == (first, held[first])


def test_overlapping_boxes_of_the_right_volume_do_not_fill_a_tensor() -> None:
    assert first_misfit((4,), [((0, 2),), ((1, 2),)]) == ((1,), 2)
    assert first_misfit((), [()]) is None
    assert first_misfit((), [(), ()]) == ((), 2)


@given(st.data())
def test_the_index_finds_exactly_the_boxes_that_share_an_element(data: st.DataObject) -> None:
    num_axes = data.draw(st.integers(1, 3))
    box = st.tuples(*[st.tuples(st.integers(0, 6), st.integers(1, 4))] * num_axes)
    boxes, wanted = data.draw(st.lists(box, max_size=12)), data.draw(box)
    shape = (10,) * num_axes
    expected = [number for number, other in enumerate(boxes) if (counts(shape, [wanted, other]) == 2).any()]
    assert sorted(BoxIndex(boxes).meeting(wanted)) == expected


def pieces_of(num_experts: int) -> list[Piece]:
    """A stacked tensor in as many pieces as experts; all of them meet on its longest axis."""
    shape = (num_experts, 1024, 64)
    return [
        Piece("experts", shape, (expert, 0, 0), (1, 1024, 64), torch.float32, lambda: torch.empty(0))
        for expert in range(num_experts)
    ]


def planned(pieces: list[Piece]) -> Metadata:
    planner = _PiecePlanner(pieces)
    return planner.create_global_plan([planner.create_local_plan()])[1]


def lines_run(action: Callable[[], object]) -> int:
    """Lines of Python that action runs, those of torch too."""
    num_lines, before = 0, sys.gettrace()

    def count(_frame: Any, event: str, _argument: Any) -> Any:
        nonlocal num_lines
        num_lines += event == "line"
        return count

    sys.settrace(count)
    try:
        action()
    finally:
        sys.settrace(before)
    return num_lines


def reader_of(metadata: Metadata, monkeypatch: pytest.MonkeyPatch) -> PieceReader:
    storage = type("Storage", (), {"read_metadata": lambda _: metadata, "set_up_storage_reader": lambda *_, **__: None})
    monkeypatch.setattr("megatron_rl.checkpoint.torch_dist.FileSystemReader", lambda _folder: storage())
    return PieceReader("folder")  # type: ignore[arg-type]


def test_twice_the_pieces_are_twice_the_work_to_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = pieces_of(100), pieces_of(200)
    assert lines_run(lambda: planned(many)) < 2.2 * lines_run(lambda: planned(few))
    readers = [(reader_of(planned(pieces), monkeypatch), pieces) for pieces in (few, many)]
    work = [lines_run(lambda reader=reader, pieces=pieces: reader.check(pieces)) for reader, pieces in readers]
    assert work[1] < 2.2 * work[0]
    again = [lines_run(lambda reader=reader, pieces=pieces: reader.check(pieces[:1])) for reader, pieces in readers]
    assert again[1] < 1.2 * again[0], "what is stored is looked through once, however often something is read"


def test_pieces_that_leave_a_gap_or_overlap_are_refused_by_place() -> None:
    pieces = pieces_of(3)
    with pytest.raises(ValueError, match=r"element \[1, 0, 0\] of experts.*\[3, 1024, 64\], 0 times"):
        planned([pieces[0], pieces[2]])
    wide = Piece("experts", (3, 1024, 64), (1, 512, 0), (1, 8, 64), torch.float32, lambda: torch.empty(0))
    with pytest.raises(ValueError, match=r"element \[1, 512, 0\] of experts.* 2 times"):
        planned([*pieces, wide])


def test_every_stored_chunk_gives_its_part_of_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a grid of chunks, the elements that the read items name are those of the piece, each once."""
    shape = (2, 6, 8)
    grid = itertools.product(range(2), range(0, 6, 3), range(0, 8, 4))
    stored = [Piece("w", shape, place, (1, 3, 4), torch.float32, lambda: torch.empty(0)) for place in grid]
    reader = reader_of(planned(stored), monkeypatch)
    wanted = Piece("w", shape, (0, 1, 2), (2, 4, 5), torch.float32, lambda: torch.empty(0))
    everything = torch.arange(math.prod(shape)).view(shape)
    got = torch.full(wanted.sizes, -1)
    for item in reader._plan([wanted]):
        chunk = next(piece for piece in stored if torch.Size(piece.offsets) == item.storage_index.offset)
        starts = [a + b for a, b in zip(chunk.offsets, item.storage_offsets, strict=True)]
        source = everything[tuple(slice(s, s + n) for s, n in zip(starts, item.lengths, strict=True))]
        target = got[tuple(slice(s, s + n) for s, n in zip(item.dest_offsets, item.lengths, strict=True))]
        assert bool((target == -1).all())
        target.copy_(source)
    assert torch.equal(got, everything[0:2, 1:5, 2:7])
