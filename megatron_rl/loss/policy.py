"""The policy-gradient term of one token: policy loss by name, guards on the ratios, bound on the gradient.

l_pg has the gradient -c A w on log p, so -c A w (u - p) on the logits, u one-hot of the token: its largest entry is
c w |A| (1 - p_theta), at the token itself. w is the weight of the policy loss (r where the trust region is open) times
the guards' factors; c holds the product at |A| g_max. (Kolibri report 2026, there for w = r)
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.loss.config import GuardConfig, LossConfig
from megatron_rl.loss.guard import NoiseTable, apply_guard
from megatron_rl.loss.reduce import check_streams
from megatron_rl.loss.trust_region import MAX_LOG_RATIO, POLICY_LOSSES, TokenLoss, btv_mask, clamped_ratio

__all__ = ["PolicyStats", "btv_mask", "gradient_scale", "policy_loss"]


@dataclass(frozen=True)
class PolicyStats:
    """What the term did to each token; [T], detached."""

    kept: Tensor
    """bool: the token is pushed, its weight is above 0."""
    gradient_scale: Tensor
    """c in (0, 1]; 1 where the weight is 0."""
    weight: Tensor
    """w: the gradient on log p is -c A w."""
    guarded: Tensor
    """bool: a guard changed the weight that the policy loss gave."""


def gradient_scale(policy_logp: Tensor, engine_logp: Tensor, *, g_max: float | None = 2.0) -> Tensor:
    """c = min(1, g_max / G), G = r (1 - p_theta): holds a token's logit gradient at |A| g_max. [T], no gradient

    1 - p_theta is taken one epsilon of the precision larger, at most 1, so the bound also holds for what autograd
    forms from a rounded p. c is 1 where that G is at most g_max, which on-policy is everywhere for g_max >= 1; 1
    everywhere if g_max is None.
    ValueError: shapes that disagree, g_max not above 0.
    """
    check_streams(policy_logp=policy_logp, engine_logp=engine_logp)
    return _scale(clamped_ratio(policy_logp, engine_logp), policy_logp, g_max)


def policy_loss(
    policy_logp: Tensor,
    engine_logp: Tensor,
    advantages: Tensor,
    *,
    config: LossConfig,
    sequence_ids: Tensor | None = None,
    proximal_logp: Tensor | None = None,
    noise: NoiseTable | None = None,
) -> tuple[Tensor, PolicyStats]:
    """(l_pg [T], what was masked and scaled). Differentiable in policy_logp only.

    For any logits, log-probs and A: the largest entry of |d l_pg / d logits| is |A| min(w (1 - p), g_max).
    With config.proximal the policy loss sees policy / proximal, and w has the guarded proximal / engine as a factor.
    sequence_ids int [T], negative where a token does not count, for gspo; noise for the guards shrink and derived.
    A token whose engine log-prob is NaN or infinite gives 0 and no gradient, with kept False and c = 1; it counts
    to no sequence.
    ValueError: shapes that disagree, a stream or table that the config needs and that is None.
    """
    check_streams(policy_logp=policy_logp, engine_logp=engine_logp, advantages=advantages)
    known = engine_logp.isfinite()
    policy_logp = torch.where(known, policy_logp, 0.0)
    logp, engine_logp = policy_logp.detach(), torch.where(known, engine_logp, 0.0).detach()
    sampler = engine_logp
    if config.proximal is not None:
        sampler = torch.where(known, _needed_proximal(proximal_logp, policy_logp), 0.0).detach()
    if sequence_ids is not None:
        sequence_ids = torch.where(known, sequence_ids, -1)
    token = POLICY_LOSSES[config.policy.kind](
        logp, sampler, advantages, options=config.policy, sequence_ids=sequence_ids
    )
    is_open = token.weight > 0
    token, guarded = _behind_guard(token, logp - sampler, logp, config.guard, noise)
    if config.proximal is not None:
        log_engine_ratio = (sampler - engine_logp).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        factor = log_engine_ratio.exp()
        token = TokenLoss(token.value * factor, token.weight * factor)
        token, noisy = _behind_guard(token, log_engine_ratio, sampler, config.proximal.guard, noise)
        guarded = guarded | noisy
    weight = torch.where(known, token.weight, 0.0)
    scale = _scale(weight, logp, config.g_max)
    value = torch.where(known, scale * token.value, 0.0).detach()
    # The difference is 0 in value and gives the gradient -c A w; a where keeps A = inf * w = 0 from being NaN.
    push = torch.where(weight > 0, -scale * advantages * weight, 0.0).detach()
    stats = PolicyStats(kept=weight > 0, gradient_scale=scale, weight=weight, guarded=known & is_open & guarded)
    return value + push * (policy_logp - logp), stats


def _behind_guard(
    token: TokenLoss, log_ratio: Tensor, logp: Tensor, guard: GuardConfig, noise: NoiseTable | None
) -> tuple[TokenLoss, Tensor]:
    """(the token with the guarded ratio in place of the ratio in it, bool [T] where that changed something).

    logp is that of the ratio's numerator, whose probability is the token's confidence.
    """
    log_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ends = guard.model_dump(exclude={"kind"})
    guarded = apply_guard(log_ratio, logp.exp(), kind=guard.kind, table=noise, **ends)
    factor = (guarded.log_weight - log_ratio).exp()
    weight = torch.where(guarded.passes, token.weight * factor, 0.0)
    return TokenLoss(token.value * factor, weight), ~guarded.passes | (guarded.log_weight != log_ratio)


def _needed_proximal(proximal_logp: Tensor | None, policy_logp: Tensor) -> Tensor:
    if proximal_logp is None:
        raise ValueError(
            "the decoupled form (loss.proximal) needs proximal_logp, got None; score the batch with the weights of the "
            "last update, or set loss.proximal to null"
        )
    check_streams(policy_logp=policy_logp, proximal_logp=proximal_logp)
    return proximal_logp


def _scale(weight: Tensor, policy_logp: Tensor, g_max: float | None) -> Tensor:
    """c for any weight. [T], no gradient"""
    if g_max is None:
        return torch.ones_like(weight)
    if not g_max > 0:
        raise ValueError(f"g_max must be above 0, got {g_max}; 2 is the Kolibri setting, None switches the bound off")
    # expm1 keeps 1 - p where p is close to 1; a log-prob rounded to above 0 counts as 0. Autograd's 1 - p comes from a
    # p that is rounded by up to an epsilon, which a large enough ratio would lift above the bound.
    epsilon = torch.finfo(policy_logp.dtype).eps
    not_taken = (torch.expm1(policy_logp.detach().clamp(max=0.0)).abs() + epsilon).clamp(max=1.0)
    return (g_max / (weight * not_taken)).clamp(max=1.0)
