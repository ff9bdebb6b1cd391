"""Log-ratios as the measurements of signal and noise take them: float64, known tokens only, sorted into bins."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_rl.loss.guard import EDGES, check_edges
from megatron_rl.loss.reduce import LARGEST_LOGP

Stream = np.ndarray | Tensor | Sequence[float]
"""[T], any floating kind, on any device."""


@dataclass(frozen=True)
class Streams:
    """What one pass saw of the tokens that the engine sampled, over all ranks; [T] each."""

    policy_logp: Stream
    engine_logp: Stream
    """NaN or infinite where it is missing."""
    entropy: Stream | None = None
    """Of the policy's whole next-token distribution, in nats, where the trainer computes it."""


@dataclass(frozen=True)
class Ratios:
    """Tokens with both log-probs, in order; float64 [N]."""

    policy_logp: np.ndarray
    engine_logp: np.ndarray

    @property
    def log_ratio(self) -> np.ndarray:
        return self.policy_logp - self.engine_logp

    @property
    def confidence(self) -> np.ndarray:
        """Probability of the token under the policy."""
        return np.exp(self.policy_logp)


def finite(value: float) -> float | None:
    """The number, or None where it is NaN or infinite, as records write it."""
    return float(value) if math.isfinite(value) else None


def as_array(stream: Stream) -> np.ndarray:
    """The stream on the host in float64. [T]"""
    if isinstance(stream, Tensor):
        return stream.detach().to("cpu", torch.float64).numpy()
    return np.asarray(stream, dtype=np.float64)


def checked_pair(policy_logp: Stream, engine_logp: Stream) -> tuple[np.ndarray, np.ndarray]:
    """Both in float64, missing engine log-probs included. [T]

    ValueError: shapes that disagree, a policy log-prob that is not finite, a log-prob above 0 by more than rounding.
    """
    policy, engine = _policy_and_engine(policy_logp, engine_logp)
    _refuse("engine_logp", engine, np.isfinite(engine) & (engine > LARGEST_LOGP))
    return policy, engine


def known_ratios(policy_logp: Stream, engine_logp: Stream) -> Ratios:
    """The tokens whose engine log-prob is known. It may be above 0: what noise does is measured, not judged.

    ValueError: shapes that disagree, a policy log-prob that is not finite or above 0 by more than rounding.
    """
    policy, engine = _policy_and_engine(policy_logp, engine_logp)
    known = np.isfinite(engine)
    return Ratios(policy[known], engine[known])


def _policy_and_engine(policy_logp: Stream, engine_logp: Stream) -> tuple[np.ndarray, np.ndarray]:
    policy, engine = as_array(policy_logp), as_array(engine_logp)
    if policy.ndim != 1 or policy.shape != engine.shape:
        raise ValueError(
            f"policy_logp and engine_logp must be two streams [T] of one length, got {list(policy.shape)} and "
            f"{list(engine.shape)}; give both of the same tokens"
        )
    _refuse("policy_logp", policy, ~(np.isfinite(policy) & (policy <= LARGEST_LOGP)))
    return policy, engine


def _refuse(name: str, stream: np.ndarray, broken: np.ndarray) -> None:
    if broken.any():
        position = int(broken.argmax())
        raise ValueError(
            f"{name} must be a log-prob, finite and at most 0, got {stream[position]} at position {position}; look for "
            "NaN weights, or logits or probabilities in place of log-probs"
        )


def by_bin(ratios: Ratios, edges: Sequence[float] = EDGES) -> list[np.ndarray]:
    """log r of the tokens in each confidence bin, bins as in loss.guard.bin_numbers. ValueError: edges do not rise."""
    check_edges(edges)
    bins = np.searchsorted(np.asarray(edges[1:-1]), ratios.confidence, side="right")
    log_ratio = ratios.log_ratio
    return [log_ratio[bins == number] for number in range(len(edges) - 1)]
