"""An environment that any model sometimes passes if it ends its turns: reward 1 when the answer's length is even."""

from megatron_rl.config import ConfigModel
from megatron_rl.records import Prompt
from megatron_rl.rollout.env import StepOutcome


class ParityOptions(ConfigModel):
    """None."""


class ParityEpisode:
    """Reward 1 for an even answer; after an odd one a second try for half of it."""

    def __init__(self) -> None:
        self._turns = 0

    def step(self, assistant_text: str) -> StepOutcome:
        self._turns += 1
        if len(assistant_text) % 2 == 0:
            return StepOutcome(done=True, reward=1.0 / self._turns)
        if self._turns == 2:
            return StepOutcome(done=True, reward=0.0)
        return StepOutcome(messages=[{"role": "user", "content": "Noch einmal."}])


class ParityEnvironment:
    """Prompts are numbered questions; one held-out split."""

    Options = ParityOptions
    splits = ("train", "heldout")

    def __init__(self, options: ParityOptions, *, name: str = "parity") -> None:
        self.name = name

    def size(self, split: str) -> int | None:
        return None if split == "train" else 8

    def prompt(self, split: str, index: int) -> Prompt:
        text = f"Frage {index} ({split})"
        return Prompt(f"{self.name}/{split}/{index}", self.name, [{"role": "user", "content": text}])

    def episode(self, prompt: Prompt) -> ParityEpisode:
        return ParityEpisode()
