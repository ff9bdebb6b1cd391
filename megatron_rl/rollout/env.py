"""What an environment is. One protocol for single-turn tasks and for multi-turn tasks with tools.

An environment hands out prompts by (split, index) and judges attempts; it never sees tokens, engines or weights.
"""

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from megatron_rl.records import Prompt

Message = dict[str, Any]
"""One HF chat message: role, content, for assistants perhaps tool_calls."""


@dataclass(frozen=True)
class StepOutcome:
    """What the environment answers to one assistant turn."""

    messages: Sequence[Message] = ()
    """Replies to append: tool results, tool errors, user turns. Rendered for the model only if the episode goes on."""
    done: bool = False
    reward: float | None = None
    """R_env of the whole attempt, known when done. A finished episode without one counts as 0."""
    signals: Mapping[str, float] = field(default_factory=dict)
    """Shares in [0, 1] over the whole episode so far, 1 is clean; the last value reported stands.
    A signal that does not apply is absent."""


class Episode(Protocol):
    """One attempt at one prompt. Not shared between rollouts."""

    def step(self, assistant_text: str) -> StepOutcome | Awaitable[StepOutcome]:
        """Judge one finished assistant turn (text without the end-of-turn token).

        What the model did wrong is an outcome, never an exception; an exception means that the environment is
        broken, and takes the rollout out of its group. A step that waits on something returns an awaitable.
        """
        ...


class Environment(Protocol):
    """A source of prompts and their judge."""

    @property
    def name(self) -> str:
        """In prompt ids and metrics; unique within a run."""
        ...

    @property
    def splits(self) -> tuple[str, ...]:
        """train, then the held-out splits. No prompt is in two of them."""
        ...

    def prompt(self, split: str, index: int) -> Prompt:
        """The index-th prompt of a split: the same on every call, machine and Python version.

        Raises ValueError for an unknown split or an index outside the split.
        """
        ...

    def size(self, split: str) -> int | None:
        """Number of prompts of a split; None when any index >= 0 has one (they may then repeat)."""
        ...

    def episode(self, prompt: Prompt) -> Episode:
        """A fresh attempt at a prompt of this environment."""
        ...


class Renderer(Protocol):
    """Messages to token ids and back, with the model's own chat template (data/render.py has the real one)."""

    @property
    def stop_token_ids(self) -> Sequence[int]:
        """Tokens that end an assistant turn."""
        ...

    def prompt_ids(self, messages: list[Message], tools: list[dict[str, Any]]) -> list[int]:
        """The whole conversation so far and the start of an assistant turn."""
        ...

    def continuation_ids(self, messages: list[Message], tools: list[dict[str, Any]]) -> list[int]:
        """What follows a sampled turn that ended in its end-of-turn token: these messages and the next turn's start."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of sampled tokens, tool-call marks included."""
        ...


def check_split(environment: Environment, split: str, index: int) -> None:
    """ValueError when the environment has no such split or the index is negative."""
    if split not in environment.splits:
        raise ValueError(f"environment {environment.name} has the splits {list(environment.splits)}, got {split!r}")
    if index < 0:
        raise ValueError(f"a prompt index is at least 0, got {index}")
