"""Arena layouts and owners, for any set of tensors."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.weight_sync.plan import ALIGNMENT, arena_layout, arena_nbytes, assign_owners


@dataclass(frozen=True)
class Spec:
    name: str
    dtype: str
    shape: tuple[int, ...]


BYTES = {"float32": 4, "bfloat16": 2, "uint8": 1}
shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
specs = st.lists(st.tuples(st.sampled_from(sorted(BYTES)), shapes), max_size=30).map(
    lambda rows: [Spec(f"t{i}", dtype, shape) for i, (dtype, shape) in enumerate(rows)]
)


@given(specs)
def test_slots_are_aligned_disjoint_and_hold_their_tensors(specs: list[Spec]) -> None:
    slots = arena_layout(specs)
    assert [(slot.name, slot.dtype, slot.shape) for slot in slots] == [(s.name, s.dtype, s.shape) for s in specs]
    end = 0
    for slot in slots:
        numel = 1
        for size in slot.shape:
            numel *= size
        assert slot.nbytes == numel * BYTES[slot.dtype]
        assert slot.offset % ALIGNMENT == 0 and slot.offset >= end
        end = slot.offset + slot.nbytes
    assert end <= arena_nbytes(slots) < end + ALIGNMENT


@given(specs, st.lists(st.integers(0, 99), min_size=1, max_size=5, unique=True))
def test_owners_share_the_bytes_evenly_and_every_rank_decides_the_same(specs: list[Spec], ranks: list[int]) -> None:
    slots = arena_layout(specs)
    owners = assign_owners(slots, ranks)
    assert owners == assign_owners(list(reversed(slots)), list(reversed(ranks)))
    assert owners.keys() == {slot.name for slot in slots} and set(owners.values()) <= set(ranks)
    loads = {rank: sum(slot.nbytes for slot in slots if owners[slot.name] == rank) for rank in ranks}
    largest = max((slot.nbytes for slot in slots), default=0)
    assert max(loads.values()) - min(loads.values()) <= largest


def test_layout_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="its own name, got a twice"):
        arena_layout([Spec("a", "float32", (1,)), Spec("a", "float32", (2,))])
    with pytest.raises(ValueError, match="got 'float31'"):
        arena_layout([Spec("a", "float31", (1,))])
