"""The baker: German word problems whose result is booked with a tool. Running example of the Kolibri post.

A price in the text has a decimal comma, the tool takes a JSON number: {"betrag": 14.4}, never "14,40".
What the splits new_texts and new_numbers test is said in baker_problem.py.
"""

import random
from typing import Any, cast

from pydantic import Field, model_validator

from megatron_rl.config import ConfigModel
from megatron_rl.records import Prompt
from megatron_rl.rewards.verify import numbers_equal
from megatron_rl.rollout.env import StepOutcome, check_split
from megatron_rl.rollout.environments.baker_problem import RANGES, SPLITS, Numbers, ProblemSource, Split
from megatron_rl.rollout.environments.baker_text import Level
from megatron_rl.rollout.tool import Tool, ToolBox

BOOK_INCOME = "buche_einnahme"
BOOK_EXPENSE = "buche_ausgabe"

_AMOUNT = {
    "type": "object",
    "properties": {"betrag": {"type": "number"}},
    "required": ["betrag"],
    "additionalProperties": False,
}


class BakerOptions(ConfigModel):
    """Which problems the baker asks."""

    level: Level = "easy"
    """easy: three kinds with small numbers, learnt by a tiny model in minutes. full: six kinds, prices in steps of
    5 cents, number words, more people, goods and phrasings."""
    kinds: list[str] | None = None
    """Kinds of problem, equally likely; null: all kinds of the level."""
    distractors: float | None = Field(ge=0, le=1, default=None)
    """Share of problems with one or two sentences that do not matter; null: 0 at level easy, .5 at level full."""
    decoy_tool: bool = False
    """Also offers buche_ausgabe. Booking with it is a wrong booking."""
    seed: int = 0
    """Another seed, other prompts; what is held out stays the same."""

    @model_validator(mode="after")
    def _kinds_exist(self) -> "BakerOptions":
        known = list(RANGES[self.level])
        unknown = [kind for kind in self.kinds or [] if kind not in known]
        if unknown or self.kinds == []:
            raise ValueError(f"kinds of level {self.level} are {known}, got {self.kinds}")
        return self


class Baker:
    """Environment: one problem, one booking."""

    Options = BakerOptions
    splits = SPLITS

    def __init__(self, options: BakerOptions, *, name: str = "baker") -> None:
        self.name = name
        self._options = options
        distractors = options.distractors if options.distractors is not None else 0.5 * (options.level == "full")
        self._source = ProblemSource(options.level, options.kinds or list(RANGES[options.level]), distractors)
        names = [BOOK_INCOME, BOOK_EXPENSE] if options.decoy_tool else [BOOK_INCOME]
        self._schemas = [_booking_tool(tool, []).schema() for tool in names]

    def prompt(self, split: str, index: int) -> Prompt:
        """The index-th problem of a split."""
        check_split(self, split, index)
        problem = self._source.draw(cast(Split, split), random.Random(f"baker/{self._options.seed}/{split}/{index}"))
        return Prompt(
            prompt_id=f"{self.name}/{split}/{index}",
            environment=self.name,
            messages=[{"role": "user", "content": problem.text()}],
            tools=self._schemas,
            task=problem.numbers.to_task(),
        )

    def size(self, split: str) -> int | None:
        """None: any index has a problem, drawn with repetition (new_numbers at level easy has few different sums)."""
        check_split(self, split, 0)
        return None

    def episode(self, prompt: Prompt) -> "BakerEpisode":
        """A fresh attempt."""
        return BakerEpisode(prompt)


class BakerEpisode:
    """Goes on after tool errors; ends with the first booking, or with a turn that calls nothing."""

    def __init__(self, prompt: Prompt) -> None:
        self._answer = Numbers.from_task(prompt.task).answer_cents / 100
        self._bookings: list[tuple[str, Any]] = []
        self._tools = ToolBox([_booking_tool(tool["function"]["name"], self._bookings) for tool in prompt.tools])

    def step(self, assistant_text: str) -> StepOutcome:
        """Reward 1 for exactly one booking, of the right amount as income; 0 for any other ending."""
        replies = self._tools.run(assistant_text)
        done = bool(self._bookings) or not replies
        reward = float(self._is_right()) if done else None
        return StepOutcome(messages=replies, done=done, reward=reward, signals=self._tools.signals())

    def _is_right(self) -> bool:
        if len(self._bookings) != 1:
            return False
        name, amount = self._bookings[0]
        return name == BOOK_INCOME and numbers_equal(amount, self._answer, tolerance=0.005)


def _booking_tool(name: str, bookings: list[tuple[str, Any]]) -> Tool:
    def book(arguments: dict[str, Any]) -> str:
        bookings.append((name, arguments["betrag"]))
        return "gebucht"

    description = "Bucht eine Einnahme in Euro." if name == BOOK_INCOME else "Bucht eine Ausgabe in Euro."
    return Tool(name=name, description=description, parameters=_AMOUNT, run=book)
