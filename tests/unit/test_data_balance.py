"""The simulation of ranks draws everything once, sorts as the trainer's buffers do, and shows what sorting gains."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.data import balance
from megatron_rl.data.balance import packed_costs, share_of_ideal, sorted_draws
from megatron_rl.data.cost import CostModel
from megatron_rl.data.cost_buffer import CostSortedBuffer
from megatron_rl.data.next_k_fit import next_k_fit

CAPACITY = 262_144
HYBRID = CostModel(full=10 * 2 * 6144, per_token=2 * 3.46e9)
"""10 layers of full attention of inner size 6,144 among others that are linear, 3.46 billion weights per token."""


@pytest.fixture(scope="module")
def heavy_tailed() -> np.ndarray:
    """Costs of 64 ranks' sequences of log-normal documents, median 3,600, sigma 1.6. [64, 2000]"""
    lengths = np.random.default_rng(0).lognormal(np.log(3600), 1.6, 200_000).astype(np.int64).clip(1, CAPACITY)
    return packed_costs(lengths, capacity=CAPACITY, open_bins=256, num_ranks=64, num_draws=2000, cost=HYBRID)


def test_cost_sorting_wins_against_random_order_and_comes_near_the_ideal(heavy_tailed: np.ndarray) -> None:
    random = share_of_ideal(np.random.default_rng(1).permuted(heavy_tailed, axis=1))
    of_size = {size: share_of_ideal(sorted_draws(heavy_tailed, size)) for size in (1, 256, 1000)}
    assert of_size[256] >= 1.6 * random
    assert of_size[256] >= 0.88 and of_size[1000] >= 0.94
    assert of_size[1] == share_of_ideal(heavy_tailed) == pytest.approx(random, rel=0.02)


def test_cost_sorting_draws_every_sequence_once(heavy_tailed: np.ndarray) -> None:
    drawn = sorted_draws(heavy_tailed, 256)
    np.testing.assert_array_equal(np.sort(drawn, axis=1), np.sort(heavy_tailed, axis=1))


@given(st.integers(1, 5), st.integers(1, 40), st.integers(1, 9), st.integers(0, 3))
@settings(max_examples=30)
def test_the_simulation_draws_what_the_buffers_of_the_trainer_draw(
    num_ranks: int, num_draws: int, size: int, seed: int
) -> None:
    costs = np.random.default_rng(seed).integers(0, 6, (num_ranks, num_draws)).astype(float)
    expected = []
    for own in costs.tolist():
        buffer: CostSortedBuffer[float] = CostSortedBuffer(size, seed=seed)
        drawn = []
        for cost in own:
            buffer.push(cost, cost)
            while buffer.ready:
                drawn.append(buffer.draw())
        expected.append(drawn + buffer.flush())
    np.testing.assert_array_equal(sorted_draws(costs, size, seed=seed), expected)


@given(st.lists(st.integers(1, 30), min_size=9, max_size=50), st.integers(1, 4), st.integers(1, 5))
@settings(max_examples=12)
def test_every_rank_packs_its_own_share_of_shuffled_passes(lengths: list[int], num_ranks: int, k: int) -> None:
    """Against the documents of each rank, dealt out by hand and packed in one go."""
    num_draws, num_documents = 12, 512
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(balance, "_BLOCK", 16)  # what a pass leaves over goes into the next block
        costs = packed_costs(
            np.array(lengths),
            capacity=30,
            open_bins=k,
            num_ranks=num_ranks,
            num_draws=num_draws,
            cost=CostModel(),
            seed=5,
        )
    passes = -(-num_documents * num_ranks // len(lengths))
    drawn = np.concatenate([np.random.default_rng([5, number]).permutation(len(lengths)) for number in range(passes)])
    for rank in range(num_ranks):
        own = np.array(lengths)[drawn[rank::num_ranks][:num_documents]]
        bins = next_k_fit(own, 30, k)[:num_draws]
        assert costs[rank].tolist() == [float((own[members] ** 2).sum()) for members in bins]


def test_the_share_of_the_ideal_is_the_time_in_which_ranks_work() -> None:
    assert share_of_ideal(np.array([[1.0, 3.0], [1.0, 3.0]])) == 1.0
    assert share_of_ideal(np.array([[1.0, 3.0], [3.0, 1.0]])) == pytest.approx(2 / 3)


def test_documents_without_tokens_cannot_fill_a_sequence() -> None:
    for lengths in ([], [0, 0]):
        with pytest.raises(ValueError, match="must have at least one token to be packed"):
            packed_costs(np.array(lengths), capacity=8, open_bins=1, num_ranks=1, num_draws=1, cost=CostModel(), seed=0)
