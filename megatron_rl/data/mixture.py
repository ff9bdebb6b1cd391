"""Which row is drawn when: a draw number alone tells, so that resuming and sharding need no other state.

A pass draws quota_i rows of dataset i, in an order of the datasets that (seed, pass) decides. The j-th draw of dataset
i, counted over all passes, is its row (j mod n_i) in an order of its n_i rows that (seed, i, j // n_i) decides: no row
is drawn a second time before every other row of its dataset was drawn once. Rank r of dp takes draws r, r + dp, ...
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

import numpy as np

from megatron_rl.config import ConfigError
from megatron_rl.data.conversation import Conversation, conversation_of
from megatron_rl.data.dataset_config import DatasetConfig, check_mixture
from megatron_rl.data.rows import Rows, open_rows

_OF_DATASETS, _OF_ROWS = 0, 1
"""First part of a spawn key: what the permutation orders."""


class Mixture:
    """Datasets and the endless order in which their rows are drawn; any draw at any time, in memory of order 8 bytes
    per row once draws are asked for.

    ConfigError for datasets that do not go together, DataError for one that is missing, empty or damaged.
    """

    def __init__(self, configs: Sequence[DatasetConfig], *, seed: int) -> None:
        try:
            check_mixture(configs)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        self.names = [config.label for config in configs]
        self.datasets: list[Rows] = [open_rows(config.path) for config in configs]
        self.quotas = pass_quotas(configs, [len(rows) for rows in self.datasets])
        """Rows of each dataset that one pass draws."""
        self._seed = seed
        # Draws mostly come in order: one pass and one order per dataset serve them, a second one bridges the border.
        self._pass = lru_cache(maxsize=2)(self._make_pass)
        self._order = [lru_cache(maxsize=2)(partial(self._make_order, dataset)) for dataset in range(len(configs))]

    @property
    def num_rows(self) -> int:
        """Rows of all datasets together."""
        return sum(len(rows) for rows in self.datasets)

    @property
    def pass_length(self) -> int:
        """Draws of one pass."""
        return sum(self.quotas)

    def locate(self, draw: int) -> tuple[int, int]:
        """(number of the dataset, number of its row) of a draw, from 0."""
        if draw < 0:
            raise ValueError(f"draw must be at least 0, got {draw}")
        number, position = divmod(draw, self.pass_length)
        one = self._pass(number)
        dataset = int(one.datasets[position])
        cycle, row = divmod(number * self.quotas[dataset] + int(one.earlier[position]), len(self.datasets[dataset]))
        return dataset, int(self._order[dataset](cycle)[row])

    def locate_many(self, draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """locate of each draw: (datasets int64 [N], rows int64 [N])."""
        if len(draws) and draws.min() < 0:
            raise ValueError(f"draws must be at least 0, got {draws.min()}")
        numbers, positions = np.divmod(np.asarray(draws, dtype=np.int64), self.pass_length)
        datasets, nth = np.empty_like(numbers), np.empty_like(numbers)
        for number, here in _alike(numbers):
            one = self._pass(number)
            datasets[here], nth[here] = one.datasets[positions[here]], one.earlier[positions[here]]
        nth += numbers * np.array(self.quotas, dtype=np.int64)[datasets]
        cycles, rows = np.divmod(nth, np.array([len(rows) for rows in self.datasets], dtype=np.int64)[datasets])
        for key, here in _alike(cycles * len(self.datasets) + datasets):
            cycle, dataset = divmod(key, len(self.datasets))
            rows[here] = self._order[dataset](cycle)[rows[here]]
        return datasets, rows

    def source(self, draw: int) -> str:
        """What errors call the row of a draw."""
        dataset, row = self.locate(draw)
        return self.datasets[dataset].source(row)

    def conversation(self, draw: int) -> Conversation:
        """The checked conversation of a draw. DataError, its source in front, for a row that is wrong."""
        dataset, row = self.locate(draw)
        rows = self.datasets[dataset]
        return conversation_of(rows.source(row), rows.row(row), dataset=self.names[dataset])

    def identity(self) -> dict[str, Any]:
        """What decides about every draw: the seed, and each dataset's contents and quota, in order."""
        return {"seed": self._seed, "quotas": self.quotas, "datasets": [rows.identity() for rows in self.datasets]}

    def _make_pass(self, number: int) -> "_Pass":
        kind = np.min_scalar_type(len(self.quotas))
        datasets = np.repeat(np.arange(len(self.quotas), dtype=kind), self.quotas)
        datasets = self._generator(_OF_DATASETS, number).permutation(datasets)
        earlier = np.empty(len(datasets), dtype=np.min_scalar_type(len(datasets)))
        for _, here in _alike(datasets):
            earlier[here] = np.arange(len(here), dtype=earlier.dtype)
        return _Pass(datasets, earlier)

    def _make_order(self, dataset: int, cycle: int) -> np.ndarray:
        count = len(self.datasets[dataset])
        rows = np.arange(count, dtype=np.min_scalar_type(count))
        return self._generator(_OF_ROWS, dataset, cycle).permutation(rows)

    def _generator(self, *key: int) -> np.random.Generator:
        return np.random.default_rng(np.random.SeedSequence(self._seed, spawn_key=key))


def _alike(values: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """(value, its places in order) for each different value."""
    places = np.argsort(values, kind="stable")
    ordered = values[places]
    starts = np.flatnonzero(np.diff(ordered, prepend=ordered[:1] - 1))
    for start, end in pairwise([*starts, len(values)]):
        yield int(ordered[start]), places[start:end]


@dataclass(frozen=True)
class _Pass:
    datasets: np.ndarray
    """[pass_length]: number of the dataset of each draw."""
    earlier: np.ndarray
    """[pass_length]: draws of the same dataset before it in the pass."""


def pass_quotas(configs: Sequence[DatasetConfig], counts: Sequence[int]) -> list[int]:
    """Rows of each dataset that a pass draws, of counts rows each. ConfigError where a share rounds to none.

    With weights, the largest-remainder shares of as many rows as all datasets have; otherwise epochs times counts.
    """
    weights = [config.weight for config in configs if config.weight is not None]
    if weights:
        quotas = largest_remainder(weights, sum(counts))
    else:
        epochs = [1.0 if config.epochs is None else config.epochs for config in configs]
        quotas = [round(times * count) for times, count in zip(epochs, counts, strict=True)]
    for config, count, quota in zip(configs, counts, quotas, strict=True):
        if not quota and config.weight != 0:
            share = f"epochs {config.epochs:g}" if config.weight is None else f"weight {config.weight:g}"
            raise ConfigError(
                f"a pass must draw at least one row of dataset {config.label}, got none: {share} of its {count} rows; "
                "raise it or remove the dataset"
            )
    return quotas


def largest_remainder(weights: Sequence[float], total: int) -> list[int]:
    """Whole numbers in proportion to weights that add up to total; of equal remainders the first is rounded up."""
    exact = [Fraction(weight) * total / sum(map(Fraction, weights)) for weight in weights]
    shares = [int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda i: shares[i] - exact[i])
    for index in by_remainder[: total - sum(shares)]:
        shares[index] += 1
    return shares
