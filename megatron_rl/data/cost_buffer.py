"""The cost-sorted buffer: ranks that never talk draw packed sequences of about equal cost at the same time.

Every rank buffers b sequences of its own, sorts them by cost and draws them in one permutation that all ranks share, so
the i-th draw is about the same quantile of the same distribution everywhere. Every sequence is drawn exactly once.
"""

from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import numpy as np

from megatron_rl.config import ConfigError

BUFFER_SIZE = 256
"""Packed sequences that a rank sorts at a time."""

Item = TypeVar("Item")


class CostSortedBuffer(Generic[Item]):
    """Fills with size items, then hands them out in the shared order while the next ones may be pushed.

    The order of buffer i is default_rng([seed, i]).permutation(size) of the items sorted by cost, equal costs as they
    came; size 1 hands items out as they come. ValueError for a size below 1.
    """

    def __init__(self, size: int = BUFFER_SIZE, *, seed: int) -> None:
        if size < 1:
            raise ValueError(f"a buffer must hold at least 1 packed sequence, got {size}")
        self.size, self.seed = size, seed
        self._number = 0
        """Of the next buffer to be sorted."""
        self._filling: list[tuple[float, Item]] = []
        self._sorted: list[Item] = []
        """What is left of the buffer that is handed out, in order."""

    @property
    def full(self) -> bool:
        """Whether push must wait for a draw."""
        return len(self._filling) == self.size

    @property
    def ready(self) -> bool:
        """Whether draw has something to hand out."""
        return bool(self._sorted) or self.full

    def push(self, item: Item, cost: float) -> None:
        """Adds an item to the buffer that fills. ValueError if it is full, or for a cost that cannot be sorted."""
        if self.full:
            raise ValueError(f"a buffer of {self.size} must be drawn from before more is pushed, got one more item")
        if not np.isfinite(cost):
            raise ValueError(f"cost must be a finite number, got {cost}")
        self._filling.append((float(cost), item))

    def draw(self) -> Item:
        """The next item. ValueError unless ready."""
        if not self._sorted and self.full:
            self._sort()
        if not self._sorted:
            raise ValueError(
                f"a buffer must hold {self.size} items before one is drawn, got {len(self._filling)}; "
                "push more, or flush at the end of the stream"
            )
        return self._sorted.pop(0)

    def flush(self) -> list[Item]:
        """All that is left, in order, at the end of a stream: what is being handed out, then the buffer that fills.

        m < size items come in the order of the first m entries of the permutation, so ranks whose last buffers differ
        by a few items still draw about the same quantiles at the same time.
        """
        left = self._sorted
        self._sorted = []
        if self._filling:
            self._sort()
        left, self._sorted = left + self._sorted, []
        return left

    def state_dict(self) -> dict[str, Any]:
        """Where the buffer stands, as plain data if the items are."""
        return {
            "size": self.size,
            "seed": self.seed,
            "number": self._number,
            "costs": [cost for cost, _ in self._filling],
            "filling": [item for _, item in self._filling],
            "sorted": list(self._sorted),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues exactly where the state was taken. ConfigError for another size or seed."""
        for name, own in (("size", self.size), ("seed", self.seed)):
            if state[name] != own:
                raise ConfigError(
                    f"a cost-sorted buffer must resume with the {name} it had, {state[name]}, got {own}; "
                    "restore the setting, or start in a new run folder"
                )
        self._number, self._sorted = state["number"], list(state["sorted"])
        self._filling = list(zip(state["costs"], state["filling"], strict=True))

    def _sort(self) -> None:
        by_cost = [item for _, item in sorted(self._filling, key=lambda pair: pair[0])]
        self._sorted = [
            by_cost[place] for place in draw_order(self.size, len(by_cost), seed=self.seed, number=self._number)
        ]
        self._number, self._filling = self._number + 1, []


def draw_order(size: int, num_items: int, *, seed: int, number: int) -> list[int]:
    """Ranks by cost, 0 the cheapest, in the order in which buffer number hands them out; num_items is at most size."""
    places = np.random.default_rng([seed, number]).permutation(size)[:num_items]
    return places.argsort().argsort().tolist()
