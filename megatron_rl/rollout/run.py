"""Prompt -> Rollout -> RolloutGroup, token in and token out.

Invariants: a token is rendered or sampled once and never again, so what is trained is what the engine saw;
a rollout always comes back, with Rollout.error set when engine or environment failed; only cancellation passes through.
"""

import asyncio
import inspect
import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from pydantic import Field

from megatron_rl.config import ConfigModel
from megatron_rl.records import Prompt, Rollout, RolloutGroup, Segment
from megatron_rl.rollout.env import Environment, Episode, Message, Renderer, StepOutcome


class RolloutConfig(ConfigModel):
    """How a prompt is attempted."""

    group_size: int = Field(ge=1, default=8)
    """Rollouts per prompt; their mean reward is the baseline."""
    temperature: float = Field(ge=0.01, default=1.0)
    """Sampling temperature; log-probs are taken at it too. vLLM would raise one below 0.01 to 0.01, unasked."""
    max_new_tokens: int = Field(ge=1, default=64)
    """Longest assistant turn in tokens, its end-of-turn token included."""
    max_turns: int = Field(ge=1, default=1)
    """Most assistant turns of a rollout."""
    context_length: int = Field(ge=2, default=512)
    """Longest rollout in tokens, prompt and tool results included."""
    injected_noise: float = Field(ge=0, default=0.0)
    """For studies of guards only: standard deviation of the noise on logits that the engine's log-probs are made to
    show. What is sampled, and evaluations, stay as they are. 0: none."""


class SampledTokens(Protocol):
    """One sampled assistant turn. Streams are [T]."""

    @property
    def token_ids(self) -> np.ndarray:
        """int32 [T], the stop token included."""
        ...

    @property
    def logp(self) -> np.ndarray:
        """float32 [T], at the sampling temperature."""
        ...

    @property
    def weight_version(self) -> np.ndarray:
        """int32 [T]"""
        ...

    @property
    def finish_reason(self) -> str:
        """stop | length"""
        ...


class Generator(Protocol):
    """Whatever samples: an engine client, a pool of them, a script in tests."""

    async def generate(
        self, prompt_ids: Sequence[int], *, max_tokens: int, temperature: float, stop_token_ids: Sequence[int]
    ) -> SampledTokens:
        """One completion. Raises what it likes when it cannot; the rollout then counts as failed."""
        ...


async def run_group(
    prompt: Prompt, env: Environment, generator: Generator, renderer: Renderer, config: RolloutConfig, *, group_id: str
) -> RolloutGroup:
    """All attempts at one prompt, at the same time."""
    async with asyncio.TaskGroup() as tasks:
        attempts = [
            tasks.create_task(run_rollout(prompt, env, generator, renderer, config, index))
            for index in range(config.group_size)
        ]
    return RolloutGroup(group_id=group_id, prompt=prompt, rollouts=[attempt.result() for attempt in attempts])


async def run_rollout(
    prompt: Prompt, env: Environment, generator: Generator, renderer: Renderer, config: RolloutConfig, index: int
) -> Rollout:
    """One attempt. rewards has one entry, as a conversation that only grows is one segment.

    finish_reason: stop (the environment ended it), length (a turn hit max_new_tokens), context (no room left),
    max_turns, error. A turn that was cut off is not shown to the environment and earns 0.
    """
    rollout = _Attempt(prompt, env.name, generator, renderer, config)
    try:
        finish_reason = await rollout.play(env)
        error = ""
    except Exception as failure:
        finish_reason, error = "error", f"{rollout.stage} failed: {type(failure).__name__}: {failure}"
    return Rollout(
        rollout_id=f"{prompt.prompt_id}#{index}",
        segments=[rollout.segment()],
        rewards=[0.0 if error else rollout.reward],
        messages=rollout.messages,
        finish_reason=finish_reason,
        error=error,
        signals=rollout.signals,
    )


class _Attempt:
    """The growing state of one rollout."""

    def __init__(
        self, prompt: Prompt, env_name: str, generator: Generator, renderer: Renderer, config: RolloutConfig
    ) -> None:
        self._prompt, self._generator, self._renderer, self._config = prompt, generator, renderer, config
        self._env_name = env_name
        self._stop_ids = list(renderer.stop_token_ids)
        self._token_ids: list[int] = []
        self._sampled: list[bool] = []
        self._engine_logp: list[float] = []
        self._weight_version: list[int] = []
        self.messages: list[Message] = list(prompt.messages)
        self.signals: dict[str, float] = {}
        self.reward = 0.0
        self.stage = "renderer"
        """Who is at work, for the error message."""

    async def play(self, env: Environment) -> str:
        """Turns until something ends the rollout; returns what did."""
        prompt_ids = self._renderer.prompt_ids(self._prompt.messages, self._prompt.tools)
        if len(prompt_ids) >= self._config.context_length:
            raise ValueError(
                f"prompt {self._prompt.prompt_id} must be shorter than rollout.context_length, got {len(prompt_ids)} "
                f"tokens for {self._config.context_length}; raise it"
            )
        self._append_given(prompt_ids)
        self.stage = f"environment {self._env_name}"
        episode = env.episode(self._prompt)
        for turn in range(self._config.max_turns):
            cut = await self._sample_turn()
            if cut:
                return cut
            outcome = await self._judge(episode)
            if outcome.done:
                return "stop"
            if turn + 1 < self._config.max_turns and not self._continue_with(list(outcome.messages)):
                return "context"
        return "max_turns"

    async def _sample_turn(self) -> str:
        """Appends one sampled turn; says "length" or "context" if it was cut off, else ""."""
        self.stage = "generator"
        room = self._config.context_length - len(self._token_ids)
        max_tokens = min(self._config.max_new_tokens, room)
        completion = await self._generator.generate(
            self._token_ids.copy(),
            max_tokens=max_tokens,
            temperature=self._config.temperature,
            stop_token_ids=self._stop_ids,
        )
        ids = [int(token) for token in completion.token_ids]
        stopped = completion.finish_reason == "stop"
        if not ids or len(ids) > max_tokens or (stopped and ids[-1] not in self._stop_ids):
            raise ValueError(
                f"a completion has 1 to {max_tokens} tokens and ends in one of {self._stop_ids} if it stopped, "
                f"got {len(ids)} tokens ending in {ids[-1:]} and finish_reason {completion.finish_reason!r}"
            )
        if not len(ids) == len(completion.logp) == len(completion.weight_version):
            raise ValueError(
                f"a completion has one logp and one weight_version per token, got {len(completion.logp)} and "
                f"{len(completion.weight_version)} for {len(ids)} tokens"
            )
        self._token_ids += ids
        self._sampled += [True] * len(ids)
        self._engine_logp += [float(logp) for logp in completion.logp]
        self._weight_version += [int(version) for version in completion.weight_version]
        self.messages.append({"role": "assistant", "content": self._renderer.decode(ids[:-1] if stopped else ids)})
        if stopped:
            return ""
        return "length" if max_tokens == self._config.max_new_tokens else "context"

    async def _judge(self, episode: Episode) -> StepOutcome:
        self.stage = f"environment {self._env_name}"
        stepped = episode.step(self.messages[-1]["content"])
        outcome = await stepped if inspect.isawaitable(stepped) else stepped
        self.messages += outcome.messages
        self.signals |= outcome.signals
        if outcome.reward is not None:
            if not math.isfinite(outcome.reward):
                raise ValueError(f"a reward must be finite, got {outcome.reward}")
            self.reward = float(outcome.reward)
        return outcome

    def _continue_with(self, messages: list[Message]) -> bool:
        """Appends the environment's replies and the next turn's start; False if no room is left to answer."""
        self.stage = "renderer"
        ids = self._renderer.continuation_ids(messages, self._prompt.tools)
        if len(self._token_ids) + len(ids) >= self._config.context_length:
            return False
        self._append_given(ids)
        return True

    def _append_given(self, ids: Sequence[int]) -> None:
        self._token_ids += ids
        self._sampled += [False] * len(ids)
        self._engine_logp += [math.nan] * len(ids)
        self._weight_version += [-1] * len(ids)

    def segment(self) -> Segment:
        """All streams so far."""
        return Segment(
            token_ids=np.array(self._token_ids, dtype=np.int32),
            sampled=np.array(self._sampled, dtype=bool),
            engine_logp=np.array(self._engine_logp, dtype=np.float32),
            weight_version=np.array(self._weight_version, dtype=np.int32),
        )
