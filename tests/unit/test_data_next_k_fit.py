"""Next-k-Fit and the baselines: every document once, nothing over capacity, at most k open, any cut of the stream."""

import json
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.config import ConfigError
from megatron_rl.data.next_k_fit import NextKFit, next_k_fit
from megatron_rl.data.packers import PACKERS, padding

CAPACITY = 40
LENGTHS = st.lists(st.integers(0, CAPACITY), max_size=60)
OPEN = st.integers(1, 8)
PACKER = st.sampled_from(sorted(PACKERS))


def next_k_fit_by_the_letter(lengths: list[int], capacity: int, k: int) -> list[list[int]]:
    """SPEC's sentence, word by word, on lists."""
    closed: list[list[int]] = []
    open_bins: list[list[int]] = []
    for document, length in enumerate(lengths):
        for members in open_bins:
            if sum(lengths[m] for m in members) + length <= capacity:
                members.append(document)
                break
        else:
            if len(open_bins) == k:
                closed.append(open_bins.pop(0))
            open_bins.append([document])
    return closed + open_bins


def best_fit_by_the_letter(lengths: list[int], capacity: int) -> list[int]:
    """Room left in every bin: the least room that is enough is taken."""
    rooms: list[int] = []
    for length in lengths:
        room = min((room for room in rooms if room >= length), default=None)
        if room is None:
            rooms.append(capacity - length)
        else:
            rooms[rooms.index(room)] -= length
    return rooms


def members_of(numbers: np.ndarray) -> list[list[int]]:
    return [np.flatnonzero(numbers == number).tolist() for number in range(numbers.max(initial=-1) + 1)]


def log_normal(count: int, *, seed: int = 0) -> np.ndarray:
    """The documents of the figures in docs/performance.md. int64 [count]"""
    lengths = np.random.default_rng(seed).lognormal(np.log(3600), 1.6, count)
    return lengths.astype(np.int64).clip(1, 262_144)


@given(LENGTHS, OPEN)
def test_next_k_fit_is_what_its_sentence_says(lengths: list[int], k: int) -> None:
    assert next_k_fit(lengths, CAPACITY, k) == next_k_fit_by_the_letter(lengths, CAPACITY, k)


@given(LENGTHS, OPEN)
def test_next_k_fit_never_has_more_than_k_bins_open(lengths: list[int], k: int) -> None:
    bins = next_k_fit(lengths, CAPACITY, k)
    for document in range(len(lengths)):
        opened = [number for number, members in enumerate(bins) if members[0] <= document]
        growing = [number for number in opened if bins[number][-1] >= document]
        assert not growing or growing[0] > opened[-1] - k
    packer: NextKFit[int] = NextKFit(CAPACITY, k)
    for document, length in enumerate(lengths):
        packer.add(length, document)
        assert len(packer.open_items) <= k


@given(LENGTHS, OPEN, PACKER)
def test_every_packer_holds_every_document_once_and_no_bin_over_capacity(lengths: list[int], k: int, name: str) -> None:
    numbers = PACKERS[name](np.array(lengths, dtype=np.int64), CAPACITY, open_bins=k)
    bins = members_of(numbers)
    assert sorted(document for members in bins for document in members) == list(range(len(lengths)))
    assert all(members and sum(lengths[d] for d in members) <= CAPACITY for members in bins)
    assert padding(numbers, np.array(lengths), CAPACITY) == pytest.approx(
        1 - sum(lengths) / (CAPACITY * len(bins)) if bins else 0
    )


@given(LENGTHS, OPEN)
def test_the_packers_of_one_interface_do_what_their_names_say(lengths: list[int], k: int) -> None:
    """First-fit is Next-k-Fit that never closes; decreasing packs the sorted list; best-fit leaves the same rooms."""
    given_lengths = np.array(lengths, dtype=np.int64)
    packed = {name: members_of(packer(given_lengths, CAPACITY, open_bins=k)) for name, packer in PACKERS.items()}
    assert packed["next_k_fit"] == next_k_fit_by_the_letter(lengths, CAPACITY, k)
    assert packed["first_fit"] == next_k_fit_by_the_letter(lengths, CAPACITY, len(lengths) + 1)
    order = sorted(range(len(lengths)), key=lambda document: -lengths[document])
    falling = [lengths[document] for document in order]
    decreasing = next_k_fit_by_the_letter(falling, CAPACITY, len(lengths) + 1)
    assert packed["first_fit_decreasing"] == [sorted(order[d] for d in members) for members in decreasing]
    rooms = [CAPACITY - sum(lengths[d] for d in members) for members in packed["best_fit_decreasing"]]
    assert sorted(rooms) == sorted(best_fit_by_the_letter(falling, CAPACITY))


@given(LENGTHS, OPEN, st.lists(st.integers(0, 9), max_size=60), st.booleans())
def test_any_cut_of_the_stream_gives_the_same_bins(lengths: list[int], k: int, cuts: list[int], by_hand: bool) -> None:
    """Chunks of any size, a save and a restart between any two, single documents: the bins are those of one call."""

    def chunks() -> Iterator[range]:
        start = 0
        for size in [*cuts, len(lengths)]:
            yield range(start, min(start + size, len(lengths)))
            start = min(start + size, len(lengths))

    packer: NextKFit[int] = NextKFit(CAPACITY, k)
    bins: list[list[int]] = []
    for chunk in chunks():
        if by_hand:
            closed = [packer.add(lengths[document], document) for document in chunk]
            bins += [items for items in closed if items is not None]
        else:
            bins += packer.add_many([lengths[document] for document in chunk], chunk)
        saved = json.loads(json.dumps(packer.state_dict()))
        packer = NextKFit(CAPACITY, k)
        packer.load_state_dict(saved)
        assert packer.state_dict() == saved
    assert bins + packer.flush() == next_k_fit(lengths, CAPACITY, k)
    assert packer.flush() == [] and packer.open_items == []


@given(LENGTHS, LENGTHS, OPEN)
def test_a_flushed_packer_starts_anew(before: list[int], after: list[int], k: int) -> None:
    packer: NextKFit[int] = NextKFit(CAPACITY, k)
    packer.add_many(before, range(len(before)))
    packer.flush()
    assert packer.add_many(after, range(len(after))) + packer.flush() == next_k_fit(after, CAPACITY, k)


def test_first_fit_goes_back_to_bins_that_next_k_fit_has_closed() -> None:
    lengths = np.array([6, 7, 8, 4, 3, 2])
    assert members_of(PACKERS["first_fit"](lengths, 10, open_bins=1)) == [[0, 3], [1, 4], [2, 5]]
    assert members_of(PACKERS["next_k_fit"](lengths, 10, open_bins=1)) == [[0], [1], [2], [3, 4, 5]]


def test_a_packer_that_has_closed_bins_is_restored_with_the_room_of_each_open_one() -> None:
    packer: NextKFit[int] = NextKFit(10, 3)
    assert packer.add_many([9, 8, 7, 6], range(4)) == [[0]]
    assert packer.state_dict()["rooms"] == [2, 3, 4]
    restored: NextKFit[int] = NextKFit(10, 3)
    restored.load_state_dict(packer.state_dict())
    assert restored.add_many([4, 2, 3], range(4, 7)) == [] and restored.flush() == [[1, 5], [2, 6], [3, 4]]


def test_items_are_handed_back_as_they_came() -> None:
    packer: NextKFit[str] = NextKFit(10, 1)
    assert packer.add(6, "a") is None and packer.add(4, "b") is None
    assert packer.add(1, "c") == ["a", "b"] and packer.flush() == [["c"]]
    numbers: NextKFit[int] = NextKFit(10, 1)
    assert numbers.add_many([6, 6], np.array([7, 8])) == [[7]]
    assert [type(item) for items in numbers.flush() for item in items] == [int]


@pytest.mark.parametrize("seed", range(3))
def test_padding_of_a_log_normal_mix_is_below_a_thousandth_at_256_bins_and_10_to_20_percent_at_1(seed: int) -> None:
    lengths, capacity = log_normal(200_000, seed=seed), 262_144
    share = {k: padding(PACKERS["next_k_fit"](lengths, capacity, open_bins=k), lengths, capacity) for k in (1, 256)}
    assert 0 <= share[256] <= 0.001 and 0.1 <= share[1] <= 0.2


def test_what_cannot_be_packed_is_refused_and_changes_nothing() -> None:
    for name, packer in PACKERS.items():
        with pytest.raises(ValueError, match="document 1 must have 0 to 10 tokens, got 11"):
            packer(np.array([3, 11]), 10, open_bins=2)
        with pytest.raises(ValueError, match="document 0 must have 0 to 10 tokens, got -1"):
            packer(np.array([-1]), 10, open_bins=2)
        for sizes, message in (
            ((10, 0), "k must be at least 1 open bin, got 0"),
            ((0, 2), "capacity must be at least 1"),
        ):
            with pytest.raises(ValueError, match=message):
                packer(np.array([3]), sizes[0], open_bins=sizes[1])
            with pytest.raises(ValueError, match=message):
                next_k_fit([3], *sizes)
        assert name in PACKERS
    packer_of_two: NextKFit[str] = NextKFit(10, 2)
    packer_of_two.add(3, "a")
    before = packer_of_two.state_dict()
    with pytest.raises(ValueError, match="document 1 must have 0 to 10 tokens, got 11"):
        packer_of_two.add_many([2, 11], ["b", "c"])
    with pytest.raises(ValueError, match="got 1 lengths and 2 items"):
        packer_of_two.add_many([2], ["b", "c"])
    assert packer_of_two.state_dict() == before
    for other in (NextKFit[str](11, 2), NextKFit[str](10, 3)):
        with pytest.raises(ConfigError, match=r"must resume with the (capacity|k) it had"):
            other.load_state_dict(before)
