"""What packing and cost-sorting would do to documents of known lengths: padding, costs, and how long ranks wait."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from megatron_rl.data.balance import packed_costs, share_of_ideal, sorted_draws
from megatron_rl.data.cost import CostModel
from megatron_rl.data.packers import PACKERS, padding

AS_PACKED = "in the order packed"
_BUFFERS, _FEW_DRAWS = 4, 256
"""Buffers that a rank draws in the simulation, and its least number of draws."""
_MANY_DOCUMENTS = 20_000_000
"""Documents that are packed in seconds."""
_MANY_SEQUENCES, _FEW_SEQUENCES = 8192, 64
"""Packed sequences that the ranks draw from."""


@dataclass(frozen=True)
class PackSettings:
    """How the trainer would pack, and over how many ranks. Sizes are at least 1."""

    capacity: int
    """Positions of a packed sequence."""
    open_bins: int
    buffer: int
    """Packed sequences that a rank sorts at a time."""
    num_ranks: int
    """Data-parallel ranks."""
    cost: CostModel
    seed: int = 0


@dataclass(frozen=True)
class Forecast:
    """What packing would give."""

    padding: Mapping[str, tuple[int, float]]
    """Packer -> (sequences of one pass, share of their positions that is padding)"""
    costs: np.ndarray
    """float64 [sequences], rising: of one pass as the trainer packs it, over their mean."""
    throughput: Mapping[str, float]
    """Order in which ranks draw -> share of the throughput of ranks whose costs are all equal."""
    num_draws: int
    """Of each rank in the simulation."""

    def speed_up(self, order: str) -> float:
        """Throughput over that in the order packed."""
        return self.throughput[order] / self.throughput[AS_PACKED]


def order_name(buffer: int) -> str:
    """What Forecast.throughput calls draws from cost-sorted buffers."""
    return f"cost-sorted, buffer {buffer}"


def forecast(lengths: np.ndarray, settings: PackSettings) -> Forecast:
    """Packs the documents once with every packer, and simulates the ranks.

    lengths int64 [documents], at least one, each at most the capacity.
    """
    capacity = settings.capacity
    packed = {
        f"Next-k-Fit, k = {k}": PACKERS["next_k_fit"](lengths, capacity, open_bins=k)
        for k in sorted({1, 16, settings.open_bins})
    }
    own = packed[f"Next-k-Fit, k = {settings.open_bins}"]
    costs = np.sort(np.bincount(own, weights=settings.cost.of_documents(lengths)))
    for name in ("first_fit", "first_fit_decreasing", "best_fit_decreasing"):
        packed[name.replace("_", "-")] = PACKERS[name](lengths, capacity, open_bins=settings.open_bins)
    found = {name: (int(numbers.max()) + 1, padding(numbers, lengths, capacity)) for name, numbers in packed.items()}
    drawn_RN = _drawn(lengths, settings)
    throughput = {AS_PACKED: share_of_ideal(drawn_RN)}
    buffer, num_draws = settings.buffer, drawn_RN.shape[1]
    for size in sorted({buffer // 16, buffer // 4, buffer, buffer * 4}):
        if 1 < size <= num_draws:
            throughput[order_name(size)] = share_of_ideal(sorted_draws(drawn_RN, size, seed=settings.seed))
    return Forecast(found, costs / costs.mean(), throughput, num_draws)


def _drawn(lengths: np.ndarray, settings: PackSettings) -> np.ndarray:
    """Costs of what the ranks draw. float64 [R, N]

    Taken at random from the sequences that one rank packs from shuffled passes without end: all ranks pack from one
    distribution, and packing for each would take long where sequences hold many documents.
    """
    affordable = int(_MANY_DOCUMENTS * lengths.mean() / settings.capacity)
    sequences_1N = packed_costs(
        lengths,
        capacity=settings.capacity,
        open_bins=settings.open_bins,
        num_ranks=1,
        num_draws=min(_MANY_SEQUENCES, max(_FEW_SEQUENCES, affordable)),
        cost=settings.cost,
        seed=settings.seed,
    )
    num_draws = max(_BUFFERS * settings.buffer, _FEW_DRAWS)
    return np.random.default_rng(settings.seed).choice(sequences_1N[0], (settings.num_ranks, num_draws))
