"""Which rank is slow: seconds of forward and backward on every rank, compared once per step.

The clock runs from the first microbatch to the moment before gradients are reduced, so what a rank waits for the others
in the reduction does not count. Ranks of one tensor-, context-, expert- or pipeline-parallel group meet inside the
forward and backward, where a slow one makes the others wait: their times come out alike, and what stands out is a group
among its data-parallel replicas. The slow rank is then one of the group's.
"""

import logging
import statistics
from collections.abc import Sequence

from megatron_rl.telemetry.values import Last, Value

SLOW = 1.5
"""Times the median of the other ranks from which a rank counts as slow."""
PATIENCE = 5
"""Steps in a row after which the same slow rank is worth a warning, and then again every as many steps."""

_log = logging.getLogger(__name__)


class StragglerWatch:
    """Follows the ranks' times over the steps. The same on every rank; rank 0 warns."""

    def __init__(self, *, is_writer: bool) -> None:
        self._is_writer = is_writer
        self._slow_rank = -1
        self._slow_steps = 0
        self.warning: str | None = None
        """One line while a rank has been slow for PATIENCE steps or more."""

    def update(self, rank_s: Sequence[float], *, step: int) -> dict[str, Value]:
        """Metrics of 0-based step from the seconds of every global rank; none where there is one rank only."""
        if len(rank_s) < 2:
            return {}
        slowest = max(range(len(rank_s)), key=lambda rank: rank_s[rank])
        others = statistics.median(seconds for rank, seconds in enumerate(rank_s) if rank != slowest)
        is_slow = rank_s[slowest] > SLOW * others
        self._slow_steps = (self._slow_steps + 1 if slowest == self._slow_rank else 1) if is_slow else 0
        self._slow_rank = slowest
        self.warning = None
        if self._slow_steps >= PATIENCE:
            self.warning = (
                f"rank {slowest} is slow: {rank_s[slowest]:.2f} s of forward and backward in step {step + 1} where the "
                f"median of the others is {others:.2f} s, for {self._slow_steps} steps now; look at its host and at "
                "the length of its documents"
            )
            if self._is_writer and self._slow_steps % PATIENCE == 0:
                _log.warning(self.warning)
        return {
            "perf/rank_s_max": Last(rank_s[slowest]),
            "perf/rank_s_median": Last(statistics.median(rank_s)),
            "perf/slowest_rank": Last(slowest),
        }
