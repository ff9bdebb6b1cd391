"""Prompt -> Rollout -> RolloutGroup: what leaves the environments and the engine."""

from typing import Any

import msgspec
import numpy as np


class Prompt(msgspec.Struct, frozen=True):
    """One task of one environment, before any sampling."""

    prompt_id: str
    """Stable over restarts: environment/split/index."""
    environment: str
    messages: list[dict[str, Any]]
    """HF chat messages."""
    tools: list[dict[str, Any]] = []
    """OpenAI function schemas; empty when the environment has none."""
    task: dict[str, Any] = {}
    """What the environment's verifier needs (answer and the like). Never rendered."""


class Segment(msgspec.Struct):
    """A maximal run of steps that extends one token context. All streams are [T]."""

    token_ids: np.ndarray
    """int32 [T]: prompt, sampled and tool tokens, exactly as the engine saw them."""
    sampled: np.ndarray
    """bool [T]: True where the engine sampled the token."""
    engine_logp: np.ndarray
    """float32 [T]: log-prob at the sampling temperature; NaN where not sampled or not reported."""
    weight_version: np.ndarray
    """int32 [T]: version that produced the token; -1 where not sampled."""

    def __post_init__(self) -> None:
        num_tokens = len(self.token_ids)
        for name in ("sampled", "engine_logp", "weight_version"):
            got = len(getattr(self, name))
            if got != num_tokens:
                raise ValueError(f"Segment.{name} must have one entry per token: expected {num_tokens}, got {got}")


class Rollout(msgspec.Struct):
    """One attempt at a prompt."""

    rollout_id: str
    """prompt_id#index-in-group."""
    segments: list[Segment]
    rewards: list[float]
    """One reward per segment, R_{i,e} of SPEC 2."""
    messages: list[dict[str, Any]]
    """The conversation as text, for people; training uses the tokens."""
    finish_reason: str
    """stop | length | max_turns | context | error"""
    error: str = ""
    """Why the infrastructure failed; such a rollout leaves before the baseline."""
    signals: dict[str, float] = {}
    """Shares in [0, 1] the environment reports, e.g. tool_well_formed."""


class RolloutGroup(msgspec.Struct):
    """All attempts at one prompt; the unit that is admitted, buffered and trained once."""

    group_id: str
    prompt: Prompt
    rollouts: list[Rollout]
