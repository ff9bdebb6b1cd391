"""Any data set of reasoning_gym (https://github.com/open-thought/reasoning-gym), single-turn.

A prompt is held out by the hash of its question text, so no question is in train and heldout, however often the
generator repeats itself. What is held out are questions, not numbers: parts of a held-out question recur in train.
"""

import random
import re
from difflib import get_close_matches
from typing import Any

from pydantic import Field, field_validator

from megatron_rl.config import ConfigError, ConfigModel
from megatron_rl.records import Prompt
from megatron_rl.rollout.env import StepOutcome, check_split
from megatron_rl.rollout.environments.splits import is_held_out

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_MAX_TRIES = 1000


class ReasoningGymOptions(ConfigModel):
    """Which data set, and how its answers are asked for."""

    dataset: str
    """Name in reasoning_gym, such as chain_sum."""
    config: dict[str, Any] = {}
    """The data set's own options, such as {max_terms: 2}; not seed and size."""
    size: int = Field(ge=2, default=1_000_000)
    """How many items of the generator prompts are drawn from."""
    seed: int = 0
    """Another seed, other items."""
    instruction: str = "Give the answer as <answer>...</answer>."
    """Appended to every question; empty: nothing is."""
    partial_credit: bool = False
    """Whether the data set's scores between 0 and 1 are rewards; else only a full score earns 1."""

    @field_validator("dataset")
    @classmethod
    def _dataset_exists(cls, dataset: str) -> str:
        known = _known_datasets()
        if dataset not in known:
            near = get_close_matches(dataset, known, n=3, cutoff=0.5)
            hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(sorted(known))}"
            raise ValueError(f"reasoning_gym has no such data set; {hint}")
        return dataset


class ReasoningGym:
    """Environment: a question, an answer in <answer> tags, the data set's own score."""

    Options = ReasoningGymOptions
    splits = ("train", "heldout")

    def __init__(self, options: ReasoningGymOptions, *, name: str = "reasoning_gym") -> None:
        import reasoning_gym

        self.name = name
        self._options = options
        try:
            self._dataset = reasoning_gym.create_dataset(
                options.dataset, seed=options.seed, size=options.size, **options.config
            )
        except (AssertionError, TypeError, ValueError) as error:
            raise ConfigError(
                f"environment {name}: options.config must fit the data set {options.dataset}, "
                f"got {options.config}: {error}"
            ) from error

    def prompt(self, split: str, index: int) -> Prompt:
        """The index-th question of a split. Items are drawn until one belongs to the split."""
        check_split(self, split, index)
        rng = random.Random(f"reasoning_gym/{self._options.seed}/{split}/{index}")
        for _ in range(_MAX_TRIES):
            item = rng.randrange(self._options.size)
            entry = self._dataset[item]
            if is_held_out("reasoning_gym", entry["question"]) == (split == "heldout"):
                return self._as_prompt(f"{self.name}/{split}/{index}", item, entry)
        raise ConfigError(
            f"environment {self.name}: {self._options.dataset} must have enough questions for the split {split}, found "
            f"none in {_MAX_TRIES} items; widen options.config"
        )

    def _as_prompt(self, prompt_id: str, item: int, entry: dict[str, Any]) -> Prompt:
        content = f"{entry['question']}\n{self._options.instruction}".strip()
        return Prompt(
            prompt_id=prompt_id,
            environment=self.name,
            messages=[{"role": "user", "content": content}],
            task={"item": item, "answer": str(entry["answer"])},
        )

    def size(self, split: str) -> int | None:
        """None: prompts are drawn from the generator's items with repetition."""
        check_split(self, split, 0)
        return None

    def episode(self, prompt: Prompt) -> "ReasoningGymEpisode":
        """A fresh attempt."""
        return ReasoningGymEpisode(self._dataset, prompt.task["item"], self._options.partial_credit)


class ReasoningGymEpisode:
    """Ends with its first turn."""

    def __init__(self, dataset: Any, item: int, partial_credit: bool) -> None:
        self._dataset, self._item, self._partial_credit = dataset, item, partial_credit

    def step(self, assistant_text: str) -> StepOutcome:
        """The score of the last answer; 0 without one, or where the data set's scorer cannot read it."""
        answers = _ANSWER.findall(assistant_text)
        score = self._score(answers[-1].strip()) if answers else 0.0
        reward = score if self._partial_credit else float(score > 0.99)
        return StepOutcome(done=True, reward=reward, signals={"answer_tagged": float(bool(answers))})

    def _score(self, answer: str) -> float:
        entry = self._dataset[self._item]
        try:
            return float(self._dataset.score_answer(answer=answer, entry=entry))
        except Exception:
            # Scorers of many data sets parse free text with eval, sympy or int; which errors escape is not documented.
            return 0.0


def _known_datasets() -> list[str]:
    import reasoning_gym.factory

    return list(reasoning_gym.factory.DATASETS)
