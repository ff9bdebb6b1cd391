"""Are the engine's log-probs those that it sampled with? One identity that holds whatever the policies are.

Tokens sampled from q with reported probability q satisfy E[p / q] = the share of p's mass that q can reach, for any p:
1 if q reaches all of it, policy movement or not. In a calibration, where both sides hold the same weights, two more
things must hold: log r does not follow -log p - H, H being the policy's entropy, and -log p is on average H.

r - 1 (and -log p - H) given the tokens before has mean 0, so sums over tokens are martingales: the standard errors hold
although tokens of one rollout depend on each other. They do not hold for rollouts chosen by their reward.
(SNR article 2026, section 3)
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from megatron_rl.config import RunError
from megatron_rl.loss.ratio_streams import Ratios, Stream, as_array, checked_pair, finite
from megatron_rl.loss.temperature import MAX_Z, relative_temperature
from megatron_rl.telemetry.snr_log import Identity

TOLERANCE = 1e-3
"""Deviation of the mean ratio that is let pass however small its standard error: rounding has some."""
UNSEEN = 10.0
"""Tokens like the heaviest seen that may be absent by chance: where 10 are expected, none comes with probability
exp(-10), which is about that of 4 standard errors."""
MAX_MISSING = 0.01
"""Share of tokens without an engine log-prob that is let pass; they leave the loss."""
ENTROPY_TOLERANCE = 0.01
"""Nats that mean(-log p) may be off the mean entropy, beside its standard error and the variance of log r."""
ONE_SIDED = 0.2
"""Share of the sum of |log r| above 0 below which a mean below 1 is mass that the sampler cannot reach."""
LIKELY = 0.9
"""Probability above which a token's alternatives may be absent by chance."""
_LARGEST_EXPONENT = 700.0


class IdentityError(RunError):
    """The engine's log-probs are not those that it sampled with."""


@dataclass(frozen=True)
class MeanOne:
    """A mean that should be 1."""

    mean: float
    error: float
    """Its standard error, from the sample's variance."""
    heaviest: float
    """What UNSEEN more values like the largest would add to it."""
    unseen_below: float = 0.0
    """What it may be too low by because likely tokens' alternatives, which have r above 1, did not come up."""
    unseen_above: float = 0.0
    """What it may be too high by because those that have r below 1 did not."""

    @property
    def z(self) -> float:
        """Standard errors above 1."""
        gap = self.mean - 1
        return gap / self.error if self.error else math.copysign(math.inf, gap) if gap else 0.0

    @property
    def side(self) -> int:
        """-1: below what 1 allows. 1: above. 0: as good as 1."""
        gap, error = self.mean - 1, max(MAX_Z * self.error, TOLERANCE)
        return int(gap > error + self.unseen_above) - int(-gap > error + max(self.heaviest, self.unseen_below))


def mean_one(log_ratio: np.ndarray) -> MeanOne:
    """The mean of r, in float64, uncapped but for exp(700). ValueError: no tokens."""
    if not len(log_ratio):
        raise ValueError("a mean ratio needs tokens with both log-probs, got none; calibrate with more prompts")
    ratio = np.exp(np.minimum(log_ratio, _LARGEST_EXPONENT))
    scale = max(1.0, float(ratio.max()))
    spread = float((ratio / scale).std(ddof=1)) * scale if len(ratio) > 1 else math.inf
    heaviest = UNSEEN * max(0.0, float(ratio.max()) - 1) / len(ratio)
    return MeanOne(float(ratio.mean()), spread / len(ratio) ** 0.5, heaviest)


def identity_check(
    policy_logp: Stream, engine_logp: Stream, *, entropy: Stream | None = None, same_weights: bool = True
) -> Identity:
    """Whether log-probs of sampled tokens can be what they claim to be, and what is probably wrong if not.

    Streams [T] of every token the engine sampled; a missing engine log-prob is NaN, infinite, or a 0 beside a token
    that the policy finds unlikely. ok: the uncapped mean ratio is 1 within 4 standard errors (or 1e-3), at most 1% is
    missing and, with same_weights and entropy, log r does not follow -log p - H and mean(-log p) is the mean entropy.

    Heavy tails: where the variance of r is infinite, or lies in tokens too rare to be seen, the standard error is too
    small and the mean too low. So below 1 the mean may miss, beside its 4 standard errors, what 10 more tokens like the
    heaviest seen would add: log-normal ratios of 400 tokens with sigma 2 then pass, 3 in a hundred did not. A tail of
    which nothing at all was seen cannot be told from a mean below 1. On either side the mean may miss what up to 10
    tokens, that likely ones came up instead of, would have weighed: the mean of a policy that is sure everywhere is off
    1 with hardly any standard error.

    | diagnosis | seen |
    |---|---|
    | missing | more than 1% without an engine log-prob |
    | truncated | mean below 1 and hardly any r above 1: top-p, top-k, min-p or a mask on the sampler's side alone |
    | temperature | log r follows -log p - H; the mean alone stays 1 if only the trainer forgot the temperature |
    | sampler | tokens likelier (or less likely) than the entropy says: neither side reports what was sampled from |
    | other | a mean off 1 without such a pattern |

    same_weights False for live tokens, whose policy may really have become sharper. Without entropy only the mean is
    checked: a temperature that the trainer forgot, and a sampler whose log-probs were taken before temperature or
    truncation on both sides alike, cannot be seen at all; a mean that is off is named a temperature where log r
    follows log p.
    ValueError: shapes that disagree, no tokens, broken log-probs.
    """
    policy, engine = checked_pair(policy_logp, engine_logp)
    if not len(policy):
        raise ValueError("the identity check needs sampled tokens, got none; calibrate with more prompts")
    missing = _missing(policy, engine)
    ratios = Ratios(policy[~missing], engine[~missing])
    surprise = None if entropy is None or not same_weights else (-policy - _aligned(entropy, policy))[~missing]
    finding = _missing_finding(missing, engine) if missing.mean() > MAX_MISSING else None
    finding = finding or _ratio_finding(ratios, surprise, same_weights) or _entropy_finding(surprise, ratios)
    return _identity(ratios, float(missing.mean()), finding)


def require_identity(identity: Identity) -> None:
    """IdentityError with reason and cure unless ok."""
    if not identity.ok:
        raise IdentityError(
            f"the engine's log-probs must be those that it sampled with, got {identity.reason} "
            f"(over {identity.tokens} tokens); {identity.cure}"
        )


@dataclass(frozen=True)
class _Finding:
    diagnosis: str
    reason: str
    cure: str


def _identity(ratios: Ratios, missing: float, finding: _Finding | None) -> Identity:
    mean = mean_one(ratios.log_ratio) if len(ratios.policy_logp) else MeanOne(math.nan, math.nan, 0.0)
    if finding is None:
        finding = _Finding("ok", f"a mean ratio of {mean.mean:.5f} ± {mean.error:.1g}", "")
    return Identity(
        ok=finding.diagnosis == "ok",
        tokens=len(ratios.policy_logp),
        missing=missing,
        mean_ratio=finite(mean.mean),
        standard_error=finite(mean.error),
        z=finite(mean.z),
        diagnosis=finding.diagnosis,
        reason=finding.reason,
        cure=finding.cure,
    )


def _missing(policy: np.ndarray, engine: np.ndarray) -> np.ndarray:
    """Not finite, or a 0 that stands for nothing. bool [T]

    A 0 says that the token was certain. Sampling that leaves one token to choose reports it honestly, but then the
    other tokens' ratios miss 1 too. Zeros beside unlikely tokens among others that are in order are placeholders.
    """
    absent = ~np.isfinite(engine)
    zeros = (engine == 0) & (policy < math.log(0.9))
    others = ~absent & (engine != 0)
    if zeros.any() and (not others.any() or mean_one((policy - engine)[others]).side == 0):
        return absent | zeros
    return absent


def _missing_finding(missing: np.ndarray, engine: np.ndarray) -> _Finding:
    zeros = int((missing & (engine == 0)).sum())
    what = f"{missing.mean():.2%} of them missing ({zeros} zeros, {int(missing.sum()) - zeros} NaN or infinite)"
    return _Finding(
        "missing",
        what,
        "ask the engine for the log-prob of every sampled token; zeros everywhere are greedy sampling or a placeholder",
    )


def _ratio_finding(ratios: Ratios, surprise: np.ndarray | None, same_weights: bool) -> _Finding | None:
    log_ratio = ratios.log_ratio
    mean = replace(
        mean_one(log_ratio),
        unseen_below=_unseen(ratios.policy_logp),
        unseen_above=_unseen(ratios.engine_logp),
    )
    # Honest noise follows log p as well: without the entropy that may only name what the mean has shown to be wrong.
    has_pattern = same_weights and (surprise is not None or mean.side != 0)
    scale = relative_temperature(ratios, surprise) if has_pattern else None
    one_sided = np.maximum(log_ratio, 0).sum() < ONE_SIDED * np.abs(log_ratio).sum()
    # A sharper engine has few ratios above 1 as well, but they are farther from it than those below.
    as_sharper = scale is not None and scale < 1 and log_ratio.max() > -log_ratio.min()
    if mean.side < 0 and one_sided and not as_sharper:
        return _Finding(
            "truncated",
            f"a mean ratio of {mean.mean:.4f} with hardly any ratio above 1: the sampler reaches only that share of "
            "the policy's probability",
            "switch off top-p, top-k, min-p, penalties and logit masks in the engine, or apply them in the trainer "
            "too; padded vocabulary rows in the trainer's softmax look the same",
        )
    if scale is not None:
        sampled_as_policy = mean.side > 0 or (surprise is not None and _sampled_as_policy(surprise, log_ratio))
        return _Finding(
            "temperature",
            f"log-probs like the trainer's at about {scale:.2f} times its temperature, with a mean ratio of "
            f"{mean.mean:.4f}",
            "let the engine report processed log-probs: it samples at the temperature, but reports without it"
            if sampled_as_policy
            else "divide the trainer's logits by rollout.temperature: the engine samples and reports with it",
        )
    if mean.side:
        return _Finding(
            "other",
            f"a mean ratio of {mean.mean:.4f}, {mean.z:+.1f} standard errors from 1, without a temperature's pattern",
            "compare both sides on one text: other weights, log-probs from another pass than the sampling one, or "
            "noise with a bias",
        )
    return None


def _unseen(logp: np.ndarray) -> float:
    """Share of tokens that were likely to be another one, at most UNSEEN of them: what they would have weighed is open.

    Only tokens of p above LIKELY count. Of sure tokens' alternatives a small calibration may hold none at all; the mean
    of those that came up is then off 1 with hardly any standard error, by what the two sides differ in 1 - p.
    """
    rest = -np.expm1(np.minimum(logp[logp > math.log(LIKELY)], 0.0))
    return min(float(rest.sum()), UNSEEN) / len(logp)


def _sampled_as_policy(surprise: np.ndarray, log_ratio: np.ndarray) -> bool:
    """Whether the tokens come from the policy rather than from what the engine reports.

    x = -log p - H has mean 0 over the policy's tokens, and r x over those of the reported distribution, whose weighted
    mean is the policy's: the one that is fewer standard errors off 0 tells.
    """

    def off(values: np.ndarray) -> float:
        return abs(float(values.sum())) / max(float(np.sqrt(np.square(values).sum())), 1e-300)

    return off(surprise) < off(np.exp(np.minimum(log_ratio, _LARGEST_EXPONENT / 3)) * surprise)


def _entropy_finding(surprise: np.ndarray | None, ratios: Ratios) -> _Finding | None:
    if surprise is None or not (gap := _off_entropy(surprise, float(ratios.log_ratio.var()))):
        return None
    sharper = gap < 0
    return _Finding(
        "sampler",
        f"tokens whose -log p is {abs(gap):.3f} nats {'below' if sharper else 'above'} the entropy on average, though "
        "both sides agree on log p",
        f"report log-probs after all sampling options: the sampler is {'sharper' if sharper else 'flatter'} than both "
        f"sides say, by its temperature{' or by top-p, top-k, min-p' if sharper else ''}",
    )


def _off_entropy(surprise: np.ndarray, noise_variance: float = 0.0) -> float:
    """Mean of -log p - H [N] if it is not 0 as it is for tokens drawn from the policy; 0 if it may be.

    A nearly certain policy may not have surprised yet: what has a chance of 1/N has a surprise of log N. Engine noise
    flattens what is sampled: the mean rises by about its variance.
    """
    size = len(surprise)
    if size < 2:
        return 0.0
    gap, error = float(surprise.mean()), float(surprise.std(ddof=1)) / size**0.5
    unseen = UNSEEN * max(math.log(size), float(surprise.max())) / size
    allowed = max(MAX_Z * error + unseen, ENTROPY_TOLERANCE + noise_variance)
    return gap if abs(gap) > allowed else 0.0


def _aligned(entropy: Stream, policy: np.ndarray) -> np.ndarray:
    values = as_array(entropy)
    if values.shape != policy.shape:
        raise ValueError(
            f"entropy must be aligned with policy_logp {list(policy.shape)}, got {list(values.shape)}; give both of "
            "the same tokens"
        )
    return values
