"""Which rank is slow: seconds of forward and backward on every rank, compared once per step.

The clock runs from the first microbatch to the moment before gradients are reduced, so what a rank waits for the others
in the reduction does not count. Ranks of one tensor-, context-, expert- or pipeline-parallel group meet inside the
forward and backward, where a slow one makes the others wait: their times come out alike. So sets of ranks that do not
meet are compared; the slow rank is one of the named set's.
"""

import logging
import statistics
from collections.abc import Sequence

from megatron_rl.distributed.groups import Place
from megatron_rl.telemetry.values import Last, Value

SLOW = 1.5
"""Times the median of the other sets of ranks from which a set counts as slow."""
PATIENCE = 5
"""Steps in a row after which the same slow set is worth a warning, and then again every as many steps."""

_log = logging.getLogger(__name__)


class StragglerWatch:
    """Follows the ranks' times over the steps. The same on every rank; rank 0 warns."""

    def __init__(self, sets: Sequence[int], *, is_writer: bool) -> None:
        """sets: for every global rank the number of its set, see sets_that_meet."""
        self._sets, self._is_writer = list(sets), is_writer
        self._slow_set = -1
        self._slow_steps = 0
        self.warning: str | None = None
        """One line while a set has been slow for PATIENCE steps or more."""

    def update(self, rank_s: Sequence[float], *, step: int) -> dict[str, Value]:
        """Metrics of 0-based step from the seconds of every global rank; none where there is one rank only."""
        if len(rank_s) < 2:
            return {}
        slowest = max(range(len(rank_s)), key=lambda rank: rank_s[rank])
        self._compare(rank_s, slowest, step)
        return {
            "perf/rank_s_max": Last(rank_s[slowest]),
            "perf/rank_s_median": Last(statistics.median(rank_s)),
            "perf/slowest_rank": Last(slowest),
        }

    def _compare(self, rank_s: Sequence[float], slowest: int, step: int) -> None:
        set_s: dict[int, float] = {}
        for number, seconds in zip(self._sets, rank_s, strict=True):
            set_s[number] = max(seconds, set_s.get(number, 0.0))
        self.warning = None
        if len(set_s) < 2:
            return
        slow_set = self._sets[slowest]
        others = statistics.median(seconds for number, seconds in set_s.items() if number != slow_set)
        is_slow = rank_s[slowest] > SLOW * others
        self._slow_steps = (self._slow_steps + 1 if slow_set == self._slow_set else 1) if is_slow else 0
        self._slow_set = slow_set
        if self._slow_steps < PATIENCE:
            return
        members = [rank for rank, number in enumerate(self._sets) if number == slow_set]
        who = f"rank {members[0]} is" if len(members) == 1 else f"one of ranks {', '.join(map(str, members))} is"
        self.warning = (
            f"{who} slow: {rank_s[slowest]:.2f} s of forward and backward in step {step + 1} where the median of the "
            f"others is {others:.2f} s, for {self._slow_steps} steps now; look at its host and at the length of its "
            "documents"
        )
        if self._is_writer and self._slow_steps % PATIENCE == 0:
            _log.warning(self.warning)


def sets_that_meet(places: Sequence[Place]) -> list[int]:
    """The number of every rank's set: ranks that share a batch or experts' tokens wait for each other in a step."""
    number = list(range(len(places)))
    while True:
        of_batch: dict[int, int] = {}
        of_experts: dict[int, int] = {}
        for place, own in zip(places, number, strict=True):
            of_batch[place.dp] = min(own, of_batch.get(place.dp, own))
            of_experts[place.edp] = min(own, of_experts.get(place.edp, own))
        joined = [min(of_batch[place.dp], of_experts[place.edp]) for place in places]
        if joined == number:
            return number
        number = joined
