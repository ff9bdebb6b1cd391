"""How long ranks wait for each other: data-parallel ranks that pack their own shares, simulated draw by draw.

Ranks meet after every microbatch, so a draw takes as long as its costliest sequence. Axes: R ranks, N draws.
"""

from collections.abc import Iterator

import numpy as np

from megatron_rl.data.cost import CostModel
from megatron_rl.data.cost_buffer import draw_order
from megatron_rl.data.next_k_fit import NextKFit

_BLOCK = 4096
"""Documents that a rank packs at a time."""


def packed_costs(
    lengths: np.ndarray,
    *,
    capacity: int,
    open_bins: int,
    num_ranks: int,
    num_draws: int,
    cost: CostModel,
    seed: int = 0,
) -> np.ndarray:
    """Costs of the sequences that each rank packs, as they come out of Next-k-Fit. float64 [R, N]

    The documents are drawn in shuffled passes without end and dealt out to the ranks one by one. ValueError without any
    token, and as in NextKFit.
    """
    if not np.asarray(lengths).sum():
        raise ValueError(f"documents must have at least one token to be packed, got {len(lengths)} without any")
    of_documents = cost.of_documents(lengths)
    packers: list[NextKFit[float]] = [NextKFit(capacity, open_bins) for _ in range(num_ranks)]
    costs: list[list[float]] = [[] for _ in range(num_ranks)]
    for block_BR in _blocks(len(lengths), num_ranks, seed):
        for rank, packer in enumerate(packers):
            if len(costs[rank]) < num_draws:
                own = block_BR[:, rank]
                costs[rank] += map(sum, packer.add_many(lengths[own], of_documents[own]))
        if min(map(len, costs)) >= num_draws:
            return np.array([own[:num_draws] for own in costs])
    raise AssertionError("the passes never end")


def sorted_draws(costs_RN: np.ndarray, size: int, *, seed: int = 0) -> np.ndarray:
    """The same costs in the order in which every rank's CostSortedBuffer hands them out. float64 [R, N]"""
    parts = []
    for number, start in enumerate(range(0, costs_RN.shape[1], size)):
        by_cost = np.sort(costs_RN[:, start : start + size], axis=1)
        parts.append(by_cost[:, draw_order(size, by_cost.shape[1], seed=seed, number=number)])
    return np.concatenate(parts, axis=1)


def share_of_ideal(costs_RN: np.ndarray) -> float:
    """Throughput over that of ranks that all take the mean: the share of time in which a rank works. Above 0 to 1."""
    return float(costs_RN.mean() / costs_RN.max(axis=0).mean())


def _blocks(num_documents: int, num_ranks: int, seed: int) -> Iterator[np.ndarray]:
    """Documents of the next _BLOCK draws of every rank, without end. int64 [_BLOCK, R]"""
    number, rest = 0, np.empty(0, dtype=np.int64)
    while True:
        parts, found = [rest], len(rest)
        while found < _BLOCK * num_ranks:
            parts.append(np.random.default_rng([seed, number]).permutation(num_documents))
            number, found = number + 1, found + num_documents
        drawn = np.concatenate(parts)
        yield drawn[: _BLOCK * num_ranks].reshape(_BLOCK, num_ranks)
        rest = drawn[_BLOCK * num_ranks :]
