"""The policy-gradient term of one token: importance ratio, B-TV mask, bound on the gradient. (Kolibri report, 2026)

l_pg = -c k A r with r = p_theta / p_mu. Gradient flows through r only, so d l_pg / d logits = -c k A r (u - p), u
one-hot of the token: its largest entry is c k |A| r (1 - p_theta) = c k |A| G, at the token itself.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron_rl.loss.config import LossConfig
from megatron_rl.loss.reduce import check_streams

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +- this before exp."""


@dataclass(frozen=True)
class PolicyStats:
    """What the term did to each token; [T], detached."""

    kept: Tensor
    """bool: k, the token is inside the trust region."""
    gradient_scale: Tensor
    """c in (0, 1]."""


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


def gradient_scale(policy_logp: Tensor, engine_logp: Tensor, *, g_max: float | None = 2.0) -> Tensor:
    """c = min(1, g_max / G), G = r (1 - p_theta): holds a token's logit gradient at |A| g_max. [T], no gradient

    1 where G <= g_max, which on-policy is everywhere for g_max >= 1; 1 everywhere if g_max is None.
    ValueError: shapes that disagree, g_max not above 0.
    """
    check_streams(policy_logp=policy_logp, engine_logp=engine_logp)
    if g_max is None:
        return torch.ones_like(policy_logp, requires_grad=False)
    if not g_max > 0:
        raise ValueError(f"g_max must be above 0, got {g_max}; 2 is the Kolibri setting, None switches the bound off")
    with torch.no_grad():
        # expm1 keeps 1 - p where p is close to 1; a log-prob rounded to above 0 counts as 0. One that rounds to 0 may
        # hide a 1 - p of the precision's epsilon, which a large enough ratio would lift above the bound.
        epsilon = torch.finfo(policy_logp.dtype).eps
        not_taken = torch.expm1(policy_logp.clamp(max=0.0)).abs().clamp(min=epsilon)
        return (g_max / (_ratio(policy_logp, engine_logp) * not_taken)).clamp(max=1.0)


def policy_loss(
    policy_logp: Tensor, engine_logp: Tensor, advantages: Tensor, *, config: LossConfig
) -> tuple[Tensor, PolicyStats]:
    """(l_pg [T], what was masked and scaled). Differentiable in policy_logp only.

    For any logits, p_mu and A: the largest entry of |d l_pg / d logits| is min(G, g_max) |A| where k = 1, else 0.
    A token whose engine log-prob is NaN or -inf gives 0 and no gradient, with k = False and c = 1.
    ValueError: shapes that disagree.
    """
    check_streams(policy_logp=policy_logp, engine_logp=engine_logp, advantages=advantages)
    known = engine_logp.isfinite()
    engine_logp = torch.where(known, engine_logp, policy_logp).detach()
    kept = known & btv_mask(
        policy_logp,
        engine_logp,
        advantages,
        eps_low=config.eps_low,
        eps_high=config.eps_high,
        sided=config.sided,
    )
    scale = torch.where(known, gradient_scale(policy_logp, engine_logp, g_max=config.g_max), 1.0)
    push = torch.where(kept, -scale * advantages, 0.0).detach()
    return push * _ratio(policy_logp, engine_logp), PolicyStats(kept=kept, gradient_scale=scale)


def _ratio(policy_logp: Tensor, engine_logp: Tensor) -> Tensor:
    """r = exp of the clamped log-ratio, with slope r everywhere: the clamp guards exp, it switches no push off."""
    log_ratio = policy_logp - engine_logp
    outside = (log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO) - log_ratio).detach()
    return (log_ratio + outside).exp()
