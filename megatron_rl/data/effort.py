"""Reasoning effort of a trace, told from its length: how far up it lies among traces of its kind, then a soft draw.

A label is drawn, not cut off: on the edge between two labels both are equally likely, so there is no token count at
which it flips and which a model could learn as a point to stop. (Kolibri, section 2.2; SPEC 12.) All in float64.
"""

import hashlib
from dataclasses import dataclass
from typing import Any, overload

import numpy as np

from megatron_rl.data.conversation import EFFORTS

MIN_TRACES = 8
"""A group of fewer traces takes its data set's percentiles: two quantiles of so few lengths are mostly chance."""
_BETA = 0.15
"""Softness: on an edge, the scaled distance to either centre is 1 / (2 beta), whatever the width."""
_CENTRES = np.array([0.15, 0.5, 0.85])
_WIDTHS = np.array([0.3, 0.4, 0.3])

Numbers = float | np.ndarray


@dataclass(frozen=True)
class Thresholds:
    """Percentiles of reasoning lengths, in tokens."""

    l30: float
    l70: float


def length_thresholds(lengths: Any) -> Thresholds | None:
    """The 30th and 70th percentiles, linear-interpolated, of the lengths above 0; None if there are none.

    ValueError for a negative length.
    """
    tokens = _lengths(lengths)
    traces = tokens[tokens > 0]
    return Thresholds(*(float(edge) for edge in np.percentile(traces, [30, 70]))) if traces.size else None


@overload
def effort_fraction(length: float, l30: float, l70: float) -> float: ...
@overload
def effort_fraction(length: np.ndarray, l30: Numbers, l70: Numbers) -> np.ndarray: ...
def effort_fraction(length: Numbers, l30: Numbers, l70: Numbers) -> Numbers:
    """Where a reasoning of length tokens lies in its group, in [0, 1]: .3 at l30, .7 at l70, linear in log length.

    Where l30 equals l70: 0 below, .5 at, 1 above. Arrays broadcast. ValueError unless 0 <= length and 0 < l30 <= l70.
    """
    tokens, low, high = _lengths(length), np.asarray(l30, np.float64), np.asarray(l70, np.float64)
    if not np.all((low > 0) & (low <= high) & (high < np.inf)):
        raise ValueError(f"percentiles must be finite with 0 < l30 <= l70, got l30 = {l30}, l70 = {l70}")
    span = np.log(high) - np.log(low)
    stepped = np.where(tokens < low, 0.0, np.where(tokens > high, 1.0, 0.5))
    with np.errstate(divide="ignore", invalid="ignore"):
        smooth = np.clip(0.3 + 0.4 * (np.log(tokens) - np.log(low)) / span, 0.0, 1.0)
    return np.where(span > 0, smooth, stepped)[()]


def effort_probabilities(u: Numbers) -> dict[str, Any]:
    """{low, medium, high}: chance of each label at a fraction u, of u's shape. They sum to 1.

    Proportional to exp(-((u - centre) / (beta width))^2 / 2). ValueError for u outside [0, 1].
    """
    fraction = np.asarray(u, np.float64)
    if not np.all((fraction >= 0) & (fraction <= 1)):
        raise ValueError(f"u must lie in [0, 1], got {u}")
    weights = np.exp(-(((fraction[..., None] - _CENTRES) / (_BETA * _WIDTHS)) ** 2) / 2)
    chances = weights / weights.sum(axis=-1, keepdims=True)
    return {effort: chances[..., i][()] for i, effort in enumerate(EFFORTS[1:])}


def sample_uniform(seed: int, sample_id: str) -> float:
    """A number of [0, 1) with 53 random bits that depends on seed and sample id alone (BLAKE2b)."""
    key = f"{seed}/{sample_id}".encode("utf-8", "surrogatepass")
    digest = hashlib.blake2b(key, digest_size=8, person=b"effort").digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def draw_efforts(uniforms: Numbers, length: Numbers, l30: Numbers, l70: Numbers) -> Any:
    """int8 index into EFFORTS for each row, of the broadcast shape: none for length 0, else drawn by the row's uniform.

    ValueError as in effort_fraction.
    """
    tokens = _lengths(length)
    chances = effort_probabilities(effort_fraction(tokens, l30, l70))
    above_low = uniforms >= chances["low"]
    above_medium = uniforms >= chances["low"] + chances["medium"]
    drawn = 1 + above_low.astype(np.int8) + above_medium.astype(np.int8)
    return np.where(tokens == 0, 0, drawn).astype(np.int8)[()]


def draw_effort(seed: int, sample_id: str, length: float, l30: float, l70: float) -> str:
    """The label of one row: none, low, medium or high. The order and number of other rows do not matter.

    length: tokens of the row's reasoning; l30, l70: percentiles of its group. ValueError as in effort_fraction.
    """
    return EFFORTS[int(draw_efforts(sample_uniform(seed, sample_id), length, l30, l70))]


def _lengths(length: Any) -> np.ndarray:
    tokens = np.asarray(length, np.float64)
    if not np.all((tokens >= 0) & (tokens < np.inf)):
        raise ValueError(f"a reasoning must have 0 or more tokens, got {length}")
    return tokens
