"""The cost-sorted buffer: everything once, the shared order, exact state in the middle."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.config import ConfigError
from megatron_rl.data.cost_buffer import CostSortedBuffer, draw_order

COSTS = st.lists(st.integers(0, 5), max_size=40)
SIZE = st.integers(1, 8)


def drawn(buffer: CostSortedBuffer[int], costs: list[float], *, first: int = 0) -> list[int]:
    """Items first, first + 1, ... of these costs, drawn whenever one is ready; not flushed."""
    out = []
    for item, cost in enumerate(costs, start=first):
        buffer.push(item, cost)
        while buffer.ready:
            out.append(buffer.draw())
    return out


@given(COSTS, SIZE, st.integers(0, 3))
def test_a_buffer_is_drawn_in_the_shared_permutation_of_its_items_by_cost(
    costs: list[float], size: int, seed: int
) -> None:
    expected = []
    for number in range(len(costs) // size):
        by_cost = sorted(range(number * size, (number + 1) * size), key=lambda item: (costs[item], item))
        order = np.random.default_rng([seed, number]).permutation(size)
        expected += [by_cost[place] for place in order]
    assert drawn(CostSortedBuffer(size, seed=seed), costs) == expected


@given(COSTS, SIZE, st.data())
def test_every_item_is_drawn_exactly_once_however_pushes_and_draws_take_turns(
    costs: list[float], size: int, data: st.DataObject
) -> None:
    """And in the same order, as long as every buffer is filled before the next."""
    buffer: CostSortedBuffer[int] = CostSortedBuffer(size, seed=1)
    out: list[int] = []
    for item, cost in enumerate(costs):
        while buffer.full or (buffer.ready and data.draw(st.booleans())):
            out.append(buffer.draw())
        buffer.push(item, cost)
    out += buffer.flush()
    assert sorted(out) == list(range(len(costs))) and not buffer.ready and buffer.flush() == []
    eager: CostSortedBuffer[int] = CostSortedBuffer(size, seed=1)
    assert out == drawn(eager, costs) + eager.flush()


@given(COSTS, SIZE, st.integers(0, 40), st.integers(0, 8))
def test_a_buffer_that_is_restored_in_the_middle_goes_on_as_if_nothing_had_been(
    costs: list[float], size: int, cut: int, num_drawn: int
) -> None:
    def run(*, restart: bool) -> list[int]:
        buffer: CostSortedBuffer[int] = CostSortedBuffer(size, seed=2)
        out = drawn(buffer, costs[:cut])
        for item, cost in enumerate(costs[cut : cut + size], start=cut):
            if buffer.full:
                break
            buffer.push(item, cost)
        out += [buffer.draw() for _ in range(num_drawn) if buffer.ready]
        if restart:
            state = json.loads(json.dumps(buffer.state_dict()))
            buffer = CostSortedBuffer(size, seed=2)
            buffer.load_state_dict(state)
            assert buffer.state_dict() == state
        while buffer.full:
            out.append(buffer.draw())
        return [*out, *drawn(buffer, [3, 1, 2, 4, 0, 9, 7], first=100), *buffer.flush()]

    assert run(restart=True) == run(restart=False)


def test_two_ranks_draw_the_same_places_whatever_they_hold() -> None:
    costs = np.random.default_rng(0).permuted(np.arange(24).reshape(1, 24).repeat(2, axis=0), axis=1)
    buffers: list[CostSortedBuffer[int]] = [CostSortedBuffer(8, seed=3) for _ in range(2)]
    of_rank = [drawn(buffer, own.tolist()) for buffer, own in zip(buffers, costs, strict=True)]
    places = [
        [sorted(own[start : start + 8]).index(own[item]) for item in items[start : start + 8]]
        for own, items in zip(costs.tolist(), of_rank, strict=True)
        for start in range(0, 24, 8)
    ]
    assert places[:3] == places[3:] and len({tuple(order) for order in places[:3]}) == 3
    assert of_rank[0] != of_rank[1]


@given(SIZE, st.data())
def test_a_partial_buffer_follows_the_full_one(size: int, data: st.DataObject) -> None:
    """Of any two draws that both have, the one that is cheaper in the full buffer is cheaper in the partial one."""
    num_items = data.draw(st.integers(1, size))
    full = draw_order(size, size, seed=4, number=1)
    part = draw_order(size, num_items, seed=4, number=1)
    assert full == np.random.default_rng([4, 1]).permutation(size).tolist()
    assert sorted(part) == list(range(num_items))
    assert all((part[a] < part[b]) == (full[a] < full[b]) for a in range(num_items) for b in range(num_items))


def test_last_buffers_that_differ_by_an_item_still_draw_about_the_same_quantiles() -> None:
    size, counts = 256, (200, 201)
    orders = [np.array(draw_order(size, count, seed=0, number=0)) / count for count in counts]
    spread = np.abs(orders[0] - orders[1][: counts[0]])
    assert spread.max() <= 1 / counts[0]
    unrelated = np.abs(orders[0] - np.random.default_rng(0).permutation(orders[1])[: counts[0]])
    assert np.median(unrelated) > 0.2


def test_a_buffer_refuses_what_it_cannot_keep_its_promise_for() -> None:
    with pytest.raises(ValueError, match="a buffer must hold at least 1 packed sequence, got 0"):
        CostSortedBuffer(0, seed=0)
    buffer: CostSortedBuffer[str] = CostSortedBuffer(2, seed=0)
    with pytest.raises(ValueError, match="must hold 2 items before one is drawn, got 0; push more"):
        buffer.draw()
    for cost in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="cost must be a finite number"):
            buffer.push("a", cost)
    buffer.push("a", 1.0)
    buffer.push("b", 2.0)
    with pytest.raises(ValueError, match="a buffer of 2 must be drawn from before more is pushed"):
        buffer.push("c", 3.0)
    for other, name in ((CostSortedBuffer[str](3, seed=0), "size"), (CostSortedBuffer[str](2, seed=1), "seed")):
        with pytest.raises(ConfigError, match=f"a cost-sorted buffer must resume with the {name} it had"):
            other.load_state_dict(buffer.state_dict())
