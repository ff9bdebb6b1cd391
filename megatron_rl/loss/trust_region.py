"""Policy losses by name: what one token is worth and how hard it is pushed, given the ratio r = policy / sampler.

Every loss here gives per token a value (the textbook one) and a weight: its gradient is -A * weight on log p, so on the
logits -A * weight * (u - p), u one-hot of the token. weight is 0 where the trust region is closed. The table with
gradient, zeros and bounds is docs/objective.md.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_rl.loss.policy_config import (
    BtvConfig,
    CispoConfig,
    DppoKlConfig,
    GspoConfig,
    NoTrustRegionConfig,
    PpoClipConfig,
    RejectConfig,
    TisConfig,
)
from megatron_rl.loss.reduce import check_streams
from megatron_rl.loss.sequences import sequence_mean

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +- this before exp."""


@dataclass(frozen=True)
class TokenLoss:
    """[T], detached."""

    value: Tensor
    """What the loss is worth."""
    weight: Tensor
    """At least 0: the loss's gradient on log p is -A * weight."""


def clamped_ratio(policy_logp: Tensor, engine_logp: Tensor) -> Tensor:
    """r = exp of the clamped log-ratio. [T], no gradient"""
    return (policy_logp - engine_logp).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def btv_mask(
    policy_logp: Tensor,
    engine_logp: Tensor,
    advantages: Tensor,
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    sided: Literal["sign", "symmetric"] = "sign",
) -> Tensor:
    """k: whether a token's probability may be pushed on in the direction of its advantage. bool [T]

    sign: A > 0 needs p_theta - p_mu <= eps_high, A <= 0 needs p_theta - p_mu >= -eps_low.
    symmetric: every token needs both. False where a log-prob is NaN.
    ValueError: shapes that disagree, a negative eps, an unknown side. (Binary total variation, DPPO)
    """
    check_streams(policy_logp=policy_logp, engine_logp=engine_logp, advantages=advantages)
    for name, eps in (("eps_low", eps_low), ("eps_high", eps_high)):
        if not eps >= 0:
            raise ValueError(f"{name} must not be negative, got {eps}; it is a change of probability, 0.2 by default")
    change = policy_logp.detach().exp() - engine_logp.detach().exp()
    may_rise, may_fall = change <= eps_high, change >= -eps_low
    if sided == "sign":
        return torch.where(advantages > 0, may_rise, may_fall)
    if sided == "symmetric":
        return may_rise & may_fall
    raise ValueError(f"sided must be sign or symmetric, got {sided!r}")


def binary_kl(policy_logp: Tensor, engine_logp: Tensor) -> Tensor:
    """KL of (token, not the token) from the engine's probabilities to the policy's, in nats. [T], no gradient

    mu log(mu/p) + (1-mu) log((1-mu)/(1-p)), with 1-p and 1-mu at least 1e-8; a lower bound of the KL over the whole
    vocabulary. (DPPO 2026)
    """
    policy_logp, engine_logp = policy_logp.detach(), engine_logp.detach()
    taken = engine_logp.exp() * (engine_logp - policy_logp)
    not_mu, not_p = (-torch.expm1(logp.clamp(max=0.0)) for logp in (engine_logp, policy_logp))
    return taken + not_mu * (not_mu.clamp(min=1e-8) / not_p.clamp(min=1e-8)).log()


def dppo_kl_mask(
    policy_logp: Tensor, engine_logp: Tensor, advantages: Tensor, *, delta: float = DppoKlConfig().delta
) -> Tensor:
    """k: False where the binary KL is above delta and A would push the token further away. bool [T]

    A > 0 is masked only where p_theta > p_mu, A <= 0 only where p_theta < p_mu; False where a log-prob is NaN.
    ValueError: shapes that disagree, a negative delta. (DPPO 2026)
    """
    check_streams(policy_logp=policy_logp, engine_logp=engine_logp, advantages=advantages)
    if not delta >= 0:
        raise ValueError(f"delta must not be negative, got {delta}; it is a KL in nats, 0.05 by default")
    close = binary_kl(policy_logp, engine_logp) <= delta
    comes_back = torch.where(advantages > 0, policy_logp <= engine_logp, policy_logp >= engine_logp)
    return close | comes_back


def _masked(kept: Tensor, policy_logp: Tensor, engine_logp: Tensor, advantages: Tensor) -> TokenLoss:
    weight = torch.where(kept, clamped_ratio(policy_logp, engine_logp), 0.0)
    return TokenLoss(-advantages * weight, weight)


def _btv(policy_logp: Tensor, engine_logp: Tensor, advantages: Tensor, *, options: BtvConfig, **_: Any) -> TokenLoss:
    kept = btv_mask(
        policy_logp,
        engine_logp,
        advantages,
        eps_low=options.eps_low,
        eps_high=options.eps_high,
        sided=options.sided,
    )
    return _masked(kept, policy_logp, engine_logp, advantages)


def _dppo_kl(
    policy_logp: Tensor, engine_logp: Tensor, advantages: Tensor, *, options: DppoKlConfig, **_: Any
) -> TokenLoss:
    kept = dppo_kl_mask(policy_logp, engine_logp, advantages, delta=options.delta)
    return _masked(kept, policy_logp, engine_logp, advantages)


def _reject(
    policy_logp: Tensor, engine_logp: Tensor, advantages: Tensor, *, options: RejectConfig, **_: Any
) -> TokenLoss:
    ratio = clamped_ratio(policy_logp, engine_logp)
    return _masked((ratio >= options.low) & (ratio <= options.high), policy_logp, engine_logp, advantages)


def _none(
    policy_logp: Tensor, engine_logp: Tensor, advantages: Tensor, *, options: NoTrustRegionConfig, **_: Any
) -> TokenLoss:
    return _masked(torch.ones_like(policy_logp, dtype=torch.bool), policy_logp, engine_logp, advantages)


def _cispo(
    policy_logp: Tensor, engine_logp: Tensor, advantages: Tensor, *, options: CispoConfig, **_: Any
) -> TokenLoss:
    weight = clamped_ratio(policy_logp, engine_logp).clamp(options.low, options.high)
    return TokenLoss(-advantages * weight * policy_logp.detach(), weight)


def _tis(policy_logp: Tensor, engine_logp: Tensor, advantages: Tensor, *, options: TisConfig, **_: Any) -> TokenLoss:
    weight = clamped_ratio(policy_logp, engine_logp).clamp(max=options.cap)
    return TokenLoss(-advantages * weight * policy_logp.detach(), weight)


def _clipped(
    ratio: Tensor, advantages: Tensor, *, eps_low: float, eps_high: float, dual_clip: float | None
) -> TokenLoss:
    """max(-A r, -A clip(r, 1 - eps_low, 1 + eps_high)), and for A <= 0 at most -A dual_clip: r clipped on one side."""
    rising = advantages > 0
    low = torch.where(rising, torch.zeros_like(ratio), 1 - eps_low)
    high = torch.where(rising, torch.full_like(ratio, 1 + eps_high), math.inf if dual_clip is None else dual_clip)
    clipped = torch.minimum(torch.maximum(ratio, low), high)
    return TokenLoss(-advantages * clipped, torch.where(clipped == ratio, ratio, 0.0))


def _ppo_clip(
    policy_logp: Tensor, engine_logp: Tensor, advantages: Tensor, *, options: PpoClipConfig, **_: Any
) -> TokenLoss:
    ratio = clamped_ratio(policy_logp, engine_logp)
    return _clipped(ratio, advantages, eps_low=options.eps_low, eps_high=options.eps_high, dual_clip=options.dual_clip)


def _gspo(
    policy_logp: Tensor,
    engine_logp: Tensor,
    advantages: Tensor,
    *,
    options: GspoConfig,
    sequence_ids: Tensor | None,
) -> TokenLoss:
    if sequence_ids is None:
        raise ValueError("the policy loss gspo needs sequence_ids, got None; pass the document number of every token")
    log_ratio = (policy_logp - engine_logp).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = sequence_mean(log_ratio, sequence_ids).exp()
    return _clipped(ratio, advantages, eps_low=options.eps_low, eps_high=options.eps_high, dual_clip=None)


POLICY_LOSSES: dict[str, Callable[..., TokenLoss]] = {
    "btv": _btv,
    "dppo_kl": _dppo_kl,
    "ppo_clip": _ppo_clip,
    "cispo": _cispo,
    "gspo": _gspo,
    "tis": _tis,
    "reject": _reject,
    "none": _none,
}
"""By name, all (policy_logp, engine_logp, advantages, *, options, sequence_ids) -> TokenLoss; streams [T], finite.

sequence_ids int [T] numbers the documents, negative for tokens that do not count; only gspo reads it.
"""
