"""Two temperatures on one text: how they show in log-probs of sampled tokens, and how that differs from noise."""

from dataclasses import dataclass

import numpy as np

from megatron_rl.loss.ratio_streams import Ratios

MAX_Z = 4.0
"""Standard errors that a mean, or the slope of a line, may be off."""
PATTERN_SLOPE = 0.01
"""Slope below which a line in log p or -log p - H is no forgotten temperature: one of 0.95 gives 0.02 and more."""
SURPRISE_R2 = 0.4
"""Share of log r's variance that a line in -log p - H explains at least. In simulations temperatures give .5 to .98;
noise on all logits less than .3 at half a nat, and .5 at one nat, where NOISE_SLOPE still tells it apart."""
NOISE_SLOPE = 1.5
"""Magnitude of the slope of the line of -log p - H in log r (the other way round) up to which noise gives it; 1
and its MAX_Z standard errors, where that is more."""
PATTERN_R2 = 0.05
"""Share of log r's variance that a line in log p explains at least, for calibrations without entropy."""
SURE = 0.1
"""Nats of entropy below which the next token counts as sure."""
SAME_SIDE = 0.75
"""Share of the sure tokens' log r on the side that the temperature puts them, at least: it puts all, noise one half."""
_LEAST_SURE = 30
"""Sure tokens below which their sides say nothing."""
_ROUNDING = 1e-6
"""Of a float32 log-prob near 0: a log r within it is on no side."""
_CUT = (0.005, 0.995)
"""Quantiles that both variables of a line are cut at: noise has heavy tails."""
_SAME_ENTROPY = 1e-4
"""Nats within which two tokens' entropies count as those of one context."""


def relative_temperature(ratios: Ratios, surprise: np.ndarray | None = None) -> float | None:
    """Temperature that turns the policy's distributions into the engine's, if log r says so; None elsewhere.

    surprise: -log p minus the exact entropy of the policy [N]. With q = p at temperature t, log r is
    (1/t - 1)(-log p - H) with H a Renyi entropy of p, nearly Shannon's: a straight line in the surprise. In log p it
    would be none, since the entropy differs between contexts; and honest noise does follow log p, as sure tokens have
    log r = 0 and undecided ones a mean below 0. Four things tell a temperature from noise:

    - The slope is 4 standard errors off 0. These come from the sum of (x y)^2 over contexts, so tokens without leverage
      (sure ones: a surprise of 0) count for nothing, and repeats of one context, whose noise is the same, count once.
      Contexts are told apart by their entropy; where two have the same, the error is only too large.
    - The line explains a good part of the variance.
    - Noise a on the policy's log-probs is in both variables: their covariance is -var(a), and var(log r) is at least
      that. A temperature's covariance is var(log r) / (1/t - 1). So noise looks like an engine that is flatter than the
      policy (t above 1), but the slope of surprise in log r stays near -1 or smaller; that of a temperature is
      -1 / (1 - 1/t), beyond NOISE_SLOPE up to t = 3.
    - Where only sure tokens are left, both are functions of 1 - p and noise is as straight as a temperature. But that
      puts the log r of all sure tokens on one side of 0, noise that of half of them.

    Without the entropy this is the line in log p, which noise can imitate: only for naming what is known to be wrong.
    """
    if len(ratios.policy_logp) < 3:
        return None
    if surprise is None:
        return _from_log_p(ratios)
    line = _line(ratios.log_ratio, surprise, contexts=-ratios.policy_logp - surprise)
    if line.z <= MAX_Z:
        return None
    noise_like = max(0.0, -line.slope) * max(NOISE_SLOPE, 1 + MAX_Z / line.z)
    if abs(line.slope) <= PATTERN_SLOPE or line.r_squared <= max(SURPRISE_R2, noise_like):
        return None
    return _within_reason(1 / max(1 + line.slope, 0.01)) if _sure_agree(ratios, surprise, line.slope) else None


def _sure_agree(ratios: Ratios, surprise: np.ndarray, slope: float) -> bool:
    """Whether sure tokens have log r on the line's side, or are too few to ask. Their surprise is below 0."""
    sure = (-ratios.policy_logp - surprise < SURE) & (surprise < 0) & (np.abs(ratios.log_ratio) > _ROUNDING)
    if sure.sum() < _LEAST_SURE:
        return True
    return float((ratios.log_ratio[sure] * slope < 0).mean()) >= SAME_SIDE


def _from_log_p(ratios: Ratios) -> float | None:
    """log r = (1 - t)(-log q - H') as well: correlates with log p, with log q and with their mean, in one direction.

    Noise that both sides have leaves the mean alone, what one side has leaves the other. 1 - t is then
    var(log r) / cov(log r, -log q), exact without noise where -log q - H' does not depend on H'.
    """
    log_ratio = ratios.log_ratio
    policy, engine = _line(log_ratio, ratios.policy_logp), _line(log_ratio, ratios.engine_logp)
    mean = _line(log_ratio, (ratios.policy_logp + ratios.engine_logp) / 2)
    one_way = min(policy.r_squared, engine.r_squared) > PATTERN_R2 / 5 and policy.slope * engine.slope > 0
    if one_way and mean.r_squared > PATTERN_R2 and abs(mean.slope) > PATTERN_SLOPE:
        return _within_reason(1 + engine.slope / engine.r_squared)
    return None


def _within_reason(temperature: float) -> float:
    return float(np.clip(temperature, 0.01, 100.0))


@dataclass(frozen=True)
class _Line:
    slope: float
    r_squared: float
    z: float
    """Sum of x y over the root of the sum of its squares, over contexts."""


def _line(values: np.ndarray, over: np.ndarray, *, contexts: np.ndarray | None = None) -> _Line:
    """Least squares through both, cut at their quantiles; all 0 where one of them is constant. [N] each

    contexts: numbers that are equal for tokens of one context; None: each token has its own.
    """
    y, x = (one.clip(*np.quantile(one, _CUT)) for one in (values, over))
    y, x = y - y.mean(), x - x.mean()
    products = x * y
    product, spread, width = (float(term.sum()) for term in (products, y**2, x**2))
    if not spread * width > 0:
        return _Line(0.0, 0.0, 0.0)
    if contexts is not None:
        which = np.unique(np.round(contexts / _SAME_ENTROPY), return_inverse=True)[1]
        products = np.bincount(which, weights=products)
    error = float(np.sqrt(np.square(products).sum()))
    return _Line(product / width, product**2 / (spread * width), abs(product) / error if error else 0.0)
