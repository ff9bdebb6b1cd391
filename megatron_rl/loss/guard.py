"""Guards on an importance ratio: what the token weighs once engine noise is reckoned with. (SNR article 2026)"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.loss.reduce import check_streams
from megatron_rl.loss.trust_region import MAX_LOG_RATIO

EDGES = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99, 1.0)
"""Confidence bins: the numerator's probability of the sampled token; a bin holds its lower edge, the last both."""

GUARD_KINDS = ("off", "tis", "clip", "reject", "clamp", "shrink", "derived")


@dataclass(frozen=True)
class NoiseTable:
    """What a calibration licenses, per confidence bin; lists as long as there are bins."""

    shrink: tuple[float, ...]
    """lambda = SNR / (1 + SNR) in [0, 1]."""
    lower: tuple[float, ...]
    """Lower bounds of log r, at most 0."""
    upper: tuple[float, ...]
    """Upper bounds of log r, at least 0."""
    edges: tuple[float, ...] = EDGES
    """Rising; one more than there are bins."""

    def __post_init__(self) -> None:
        bins = len(self.edges) - 1
        for name in ("shrink", "lower", "upper"):
            if len(getattr(self, name)) != bins:
                raise ValueError(f"NoiseTable.{name} must have one entry per bin: {bins}, got {getattr(self, name)}")
        check_edges(self.edges)
        for name, low, high in (("shrink", 0.0, 1.0), ("lower", -math.inf, 0.0), ("upper", 0.0, math.inf)):
            for value in getattr(self, name):
                if not (low <= value <= high and math.isfinite(value)):
                    raise ValueError(
                        f"NoiseTable.{name} must be finite and in [{low}, {high}], got {value}; calibrate again"
                    )

    def to_dict(self) -> dict[str, list[float]]:
        """For JSON and msgpack."""
        return {name: list(getattr(self, name)) for name in ("shrink", "lower", "upper", "edges")}

    @classmethod
    def from_dict(cls, data: Mapping[str, Sequence[float]]) -> "NoiseTable":
        """Inverse of to_dict. ValueError: a key that is missing or unknown, values that make no table."""
        names = ("shrink", "lower", "upper", "edges")
        if sorted(data) != sorted(names):
            raise ValueError(f"a noise table has {', '.join(names)}, got {', '.join(sorted(data))}; calibrate again")
        return cls(**{name: tuple(map(float, data[name])) for name in names})


@dataclass(frozen=True)
class Guarded:
    """[T], detached."""

    log_weight: Tensor
    """The token's importance weight is exp of this; -inf where it was dropped."""
    passes: Tensor
    """bool: the token still has a gradient."""


def check_edges(edges: Sequence[float]) -> None:
    """ValueError unless edges rise from 0 to 1."""
    if len(edges) < 2 or edges[0] != 0 or edges[-1] != 1 or any(a >= b for a, b in itertools.pairwise(edges)):
        raise ValueError(f"edges must rise from 0 to 1, got {list(edges)}; the usual ones are {list(EDGES)}")


def apply_guard(
    log_ratio: Tensor,
    confidence: Tensor,
    *,
    kind: str,
    low: float | None = None,
    high: float | None = None,
    table: NoiseTable | None = None,
) -> Guarded:
    """The guarded weight of each token. Streams [T]; low and high are ratios; no gradient flows through the result.

    log r is first clamped to +-20. confidence: probability of the token under the ratio's numerator, for the bins.

    | kind | weight | no gradient | needs |
    |---|---|---|---|
    | off | r | | |
    | tis | min(r, high) | | high |
    | clip | r clamped to [low, high] | outside | low, high |
    | reject | r, outside 0 | outside | low, high |
    | clamp | r clamped to [low, high] | | low, high |
    | shrink | r^lambda of the bin | | table |
    | derived | r clamped to the bin's bounds | | table |

    tis censors one tail, so symmetric noise in log r becomes a bias. clip and above all reject take the gradient from
    tokens by their ratio, and a ratio leaves a band where the policy is undecided: reject deletes fork tokens, which
    makes the policy less sure there, thickens the tail and deletes more. Clamp, shrink or derive instead.
    table is read by shrink and derived only. ValueError: shapes that disagree, an unknown kind, an end or table that
    the kind needs and lacks, an end without effect, ends that are not 0 <= low <= 1 <= high.
    """
    check_streams(log_ratio=log_ratio, confidence=confidence)
    _check_ends(kind, low, high)
    log_ratio = log_ratio.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    passes = torch.ones_like(log_ratio, dtype=torch.bool)
    if kind == "off":
        return Guarded(log_ratio, passes)
    if kind in ("shrink", "derived"):
        return Guarded(_by_table(log_ratio, confidence.detach(), kind, table), passes)
    log_low, log_high = (-math.inf if not end else math.log(end) for end in (low, high))
    clamped = log_ratio.clamp(log_low, log_high)
    if kind in ("tis", "clamp"):
        return Guarded(clamped, passes)
    inside = clamped == log_ratio
    return Guarded(clamped if kind == "clip" else torch.where(inside, log_ratio, -math.inf), inside)


def bin_numbers(confidence: Tensor, edges: Sequence[float] = EDGES) -> Tensor:
    """Index of each token's confidence bin, from 0; outside [0, 1] the nearest one, NaN the last. int [T]"""
    inner = torch.tensor(edges[1:-1], dtype=torch.float64, device=confidence.device)
    return torch.bucketize(confidence.double(), inner, right=True)


def _by_table(log_ratio: Tensor, confidence: Tensor, kind: str, table: NoiseTable | None) -> Tensor:
    if table is None:
        raise ValueError(f"guard {kind} needs a noise table, got None; calibrate first (trainer.snr), or choose clamp")
    bins = bin_numbers(confidence, table.edges)

    def of_token(values: tuple[float, ...]) -> Tensor:
        return torch.tensor(values, dtype=log_ratio.dtype, device=log_ratio.device)[bins]

    if kind == "shrink":
        return of_token(table.shrink) * log_ratio
    return torch.minimum(torch.maximum(log_ratio, of_token(table.lower)), of_token(table.upper))


def _check_ends(kind: str, low: float | None, high: float | None) -> None:
    if kind not in GUARD_KINDS:
        raise ValueError(f"guard must be one of {', '.join(GUARD_KINDS)}, got {kind!r}; off leaves the ratio alone")
    needs_high, needs_low = kind in ("tis", "clip", "reject", "clamp"), kind in ("clip", "reject", "clamp")
    for name, end, needed in (("low", low, needs_low), ("high", high, needs_high)):
        if (end is not None) != needed:
            rule = f"guard {kind} {'needs' if needed else 'has no use for'} {name}"
            raise ValueError(f"{rule}, got {end}; {'give a ratio' if needed else 'remove it'}")
    if low is not None and not 0 <= low <= 1:
        raise ValueError(f"guard {kind}: low must be a ratio in [0, 1], got {low}; 0.5 is a common one")
    if high is not None and not 1 <= high < math.inf:
        raise ValueError(f"guard {kind}: high must be a ratio of at least 1, got {high}; 2 is a common one")
