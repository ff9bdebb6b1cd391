"""Rollouts: tokens as the engine saw them, every ending, every failure."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from megatron_rl.records import Prompt
from megatron_rl.rollout.env import StepOutcome
from megatron_rl.rollout.run import RolloutConfig, run_group, run_rollout

STOP = 1
PROMPT = Prompt(prompt_id="toy/train/0", environment="toy", messages=[{"role": "user", "content": "abc"}])


class Letters:
    """A token per letter; 1 ends a turn, 2 starts one."""

    stop_token_ids = (STOP,)

    def prompt_ids(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[int]:
        return [ord(letter) for message in messages for letter in message["content"]] + [2]

    continuation_ids = prompt_ids

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(token) for token in ids)


@dataclass
class Turn:
    token_ids: np.ndarray
    logp: np.ndarray
    weight_version: np.ndarray
    finish_reason: str


class Script:
    """Plays the given texts, a turn each; "|" marks where a turn ends by itself."""

    def __init__(self, *texts: str) -> None:
        self.texts = list(texts)
        self.seen: list[list[int]] = []

    async def generate(
        self, prompt_ids: Sequence[int], *, max_tokens: int, temperature: float, stop_token_ids: Sequence[int]
    ) -> Turn:
        version = len(self.seen)
        self.seen.append(list(prompt_ids))
        ids = [STOP if letter == "|" else ord(letter) for letter in self.texts[version]][:max_tokens]
        return Turn(
            token_ids=np.array(ids, dtype=np.int32),
            logp=-np.arange(1, len(ids) + 1, dtype=np.float32),
            weight_version=np.full(len(ids), version, dtype=np.int32),
            finish_reason="stop" if ids[-1] == STOP else "length",
        )


class Toy:
    """Goes on until a turn says "end"; rewards 1 for it."""

    name = "toy"
    splits = ("train",)

    def __init__(self) -> None:
        self.heard: list[str] = []

    def prompt(self, split: str, index: int) -> Prompt:
        return PROMPT

    def size(self, split: str) -> int | None:
        return None

    def episode(self, prompt: Prompt) -> "Toy":
        return self

    def step(self, assistant_text: str) -> StepOutcome:
        self.heard.append(assistant_text)
        if assistant_text == "end":
            return StepOutcome(done=True, reward=1.0, signals={"asked": 0.5})
        return StepOutcome(messages=[{"role": "tool", "content": "no"}], signals={"asked": 1.0})


def play(generator: Any, env: Any = None, **config: Any) -> Any:
    settings = RolloutConfig(**({"max_turns": 4, "max_new_tokens": 16, "context_length": 100} | config))
    return asyncio.run(run_rollout(PROMPT, env or Toy(), generator, Letters(), settings, 3))


def test_every_turn_extends_exactly_the_tokens_that_the_generator_saw() -> None:
    generator = Script("hm|", "end|")
    rollout = play(generator)
    (segment,) = rollout.segments
    tokens = segment.token_ids.tolist()
    first, second = generator.seen
    assert first == tokens[: len(first)] and second == tokens[: len(second)]
    assert Letters().decode(tokens).replace(chr(STOP), "|").replace(chr(2), ">") == "abc>hm|no>end|"
    assert segment.sampled.tolist() == [False] * 4 + [True] * 3 + [False] * 3 + [True] * 4
    np.testing.assert_array_equal(segment.engine_logp[segment.sampled], [-1, -2, -3, -1, -2, -3, -4])
    assert np.isnan(segment.engine_logp[~segment.sampled]).all()
    assert segment.weight_version.tolist() == [-1] * 4 + [0] * 3 + [-1] * 3 + [1] * 4
    assert (rollout.finish_reason, rollout.rewards, rollout.error) == ("stop", [1.0], "")
    assert rollout.rollout_id == "toy/train/0#3"
    assert rollout.signals == {"asked": 0.5}
    assert [message["role"] for message in rollout.messages] == ["user", "assistant", "tool", "assistant"]


@pytest.mark.parametrize(
    ("texts", "config", "reason", "num_heard"),
    [
        (["hm|", "hm|"], {"max_turns": 2}, "max_turns", 2),
        (["too long|"], {"max_new_tokens": 3}, "length", 0),
        (["too long|"], {"context_length": 8}, "context", 0),
        (["hm|", "end|"], {"context_length": 10}, "context", 1),
    ],
)
def test_a_rollout_that_is_not_ended_by_its_environment_earns_nothing(
    texts: list[str], config: dict[str, int], reason: str, num_heard: int
) -> None:
    env = Toy()
    rollout = play(Script(*texts), env, **config)
    assert (rollout.finish_reason, rollout.rewards, rollout.error) == (reason, [0.0], "")
    assert len(env.heard) == num_heard
    assert rollout.segments[0].sampled[-1], "no untrained tail: replies nobody answers are not rendered"


@settings(max_examples=60, deadline=None)
@given(st.integers(5, 40), st.integers(1, 12), st.lists(st.integers(1, 9), min_size=4, max_size=4))
def test_no_rollout_outgrows_its_context(context_length: int, max_new_tokens: int, lengths: list[int]) -> None:
    generator = Script(*("x" * length + "|" for length in lengths))
    rollout = play(generator, context_length=context_length, max_new_tokens=max_new_tokens)
    (segment,) = rollout.segments
    assert not rollout.error
    assert len(segment.token_ids) <= context_length
    turns = np.diff(np.flatnonzero(np.diff(np.r_[0, segment.sampled, 0])))[::2]
    assert max(turns) <= max_new_tokens


def test_a_prompt_that_fills_the_context_names_the_setting() -> None:
    rollout = play(Script("x|"), context_length=4)
    assert rollout.finish_reason == "error" and "rollout.context_length" in rollout.error


class Broken(Script):
    async def generate(self, *args: Any, **kwargs: Any) -> Turn:
        if self.texts:
            return await super().generate(*args, **kwargs)
        raise ConnectionError("engine is gone")


class Unterminated(Script):
    async def generate(self, *args: Any, **kwargs: Any) -> Turn:
        turn = await super().generate(*args, **kwargs)
        return Turn(turn.token_ids[:-1], turn.logp[:-1], turn.weight_version[:-1], "stop")


class Misaligned(Script):
    async def generate(self, *args: Any, **kwargs: Any) -> Turn:
        turn = await super().generate(*args, **kwargs)
        return Turn(turn.token_ids, turn.logp[:-1], turn.weight_version, "stop")


@pytest.mark.parametrize(
    ("generator", "said"),
    [
        (Broken(), "generator failed: ConnectionError: engine is gone"),
        (Unterminated("end|"), "ends in one of [1]"),
        (Misaligned("end|"), "one logp"),
    ],
)
def test_a_failing_generator_marks_the_rollout_and_raises_nothing(generator: Script, said: str) -> None:
    rollout = play(generator)
    assert rollout.finish_reason == "error" and said in rollout.error and rollout.rewards == [0.0]


class Faulty(Toy):
    def step(self, assistant_text: str) -> StepOutcome:
        raise KeyError("betrag")


class Unbounded(Toy):
    def step(self, assistant_text: str) -> StepOutcome:
        return StepOutcome(done=True, reward=float("nan"))


@pytest.mark.parametrize("env", [Faulty(), Unbounded()])
def test_a_failing_environment_is_named(env: Toy) -> None:
    rollout = play(Script("end|"), env)
    assert rollout.error.startswith("environment toy failed: ") and rollout.rewards == [0.0]
    assert rollout.segments[0].sampled.any(), "what was sampled is kept for people"


class Slow(Toy):
    async def step(self, assistant_text: str) -> StepOutcome:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().step(assistant_text)


def test_a_step_may_wait() -> None:
    assert play(Script("hm|", "end|"), Slow()).rewards == [1.0]


class Meeting:
    """Answers only when all rollouts of the group have asked."""

    def __init__(self, size: int) -> None:
        self._barrier = asyncio.Barrier(size)

    async def generate(self, prompt_ids: Sequence[int], **options: Any) -> Turn:
        await self._barrier.wait()
        return await Script("end|").generate(prompt_ids, **options)


def test_a_group_runs_its_rollouts_at_the_same_time() -> None:
    async def run() -> Any:
        config = RolloutConfig(group_size=5)
        return await run_group(PROMPT, Toy(), Meeting(5), Letters(), config, group_id="g")

    group = asyncio.run(asyncio.wait_for(run(), 5))
    assert [rollout.rollout_id for rollout in group.rollouts] == [f"toy/train/0#{index}" for index in range(5)]
    assert group.group_id == "g" and group.prompt is PROMPT


def test_cancelling_a_group_cancels_its_rollouts() -> None:
    async def run() -> None:
        waiting = Meeting(100)
        task = asyncio.create_task(
            run_group(PROMPT, Toy(), waiting, Letters(), RolloutConfig(group_size=3), group_id="g")
        )
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())


def test_a_cancelled_rollout_is_cancelled_not_failed() -> None:
    async def run() -> None:
        task = asyncio.create_task(run_rollout(PROMPT, Toy(), Meeting(100), Letters(), RolloutConfig(), 0))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())


def test_a_temperature_that_the_engine_would_silently_raise_is_refused() -> None:
    """vLLM samples at 0.01 when asked for less; the trainer would divide by what the run file says."""
    assert RolloutConfig(temperature=0.01).temperature == 0.01
    with pytest.raises(ValidationError, match="temperature"):
        RolloutConfig(temperature=0.009)
