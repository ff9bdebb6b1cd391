"""Where training prompts come from: environments in proportion to their weights, each in its own fixed order.

Invariant: the sequence of prompts is a function of (seed, number of draws) alone, so a restored source goes on exactly
where the checkpoint left it.
"""

from collections.abc import Sequence

import numpy as np

from megatron_rl.orchestrator.state import OrchestratorState
from megatron_rl.records import Prompt
from megatron_rl.rollout.env import Environment

_MEASURED = 1
"""Keeps the random numbers of measurements apart from those of the draws."""
_MANY_PROMPTS = 2**31
"""Where an environment has any number of prompts, measurements take theirs from so many."""


class PromptSource:
    """Draws prompts from the train split of weighted environments."""

    def __init__(self, environments: Sequence[Environment], weights: Sequence[float], *, seed: int) -> None:
        if len(environments) != len(weights) or not environments or min(weights) <= 0:
            raise ValueError(f"every environment needs a weight above 0, got weights {list(weights)}")
        self._environments = {environment.name: environment for environment in environments}
        self._shares = np.array(weights, dtype=np.float64) / np.sum(weights)
        self.seed = seed
        self.state = OrchestratorState(next_index=dict.fromkeys(self._environments, 0), draws=0, groups_trained=0)

    def draw(self, environment: str | None = None) -> Prompt:
        """The next prompt, of the given environment or of one drawn by weight."""
        name = environment if environment is not None else self._choose()
        index = self.state.next_index[name]
        self.state.next_index[name] = index + 1
        self.state.draws += 1
        source = self._environments[name]
        size = source.size("train")
        return source.prompt("train", index if size is None else index % size)

    def measured_prompt(self, step: int, number: int) -> Prompt:
        """A training prompt for a measurement after a step: drawn apart, so that no prompt of the run is used up."""
        random = np.random.default_rng([self.seed, step, number, _MEASURED])
        name = self._choice(random)
        source = self._environments[name]
        size = source.size("train")
        return source.prompt("train", int(random.integers(_MANY_PROMPTS if size is None else size)))

    def environment(self, name: str) -> Environment:
        """The environment a prompt names."""
        return self._environments[name]

    def restore(self, state: OrchestratorState) -> None:
        """Goes on from a checkpoint's state; environments it does not know start at their first prompt."""
        indices = {name: state.next_index.get(name, 0) for name in self._environments}
        self.state = OrchestratorState(next_index=indices, draws=state.draws, groups_trained=state.groups_trained)

    def _choose(self) -> str:
        return self._choice(np.random.default_rng([self.seed, self.state.draws]))

    def _choice(self, random: np.random.Generator) -> str:
        return list(self._environments)[int(random.choice(len(self._shares), p=self._shares))]
