"""The terms of the objective beside the policy loss, per token; each goes to 0 with its coefficient."""

import math
from dataclasses import dataclass

from torch import Tensor

from megatron_rl.loss.config import LossConfig
from megatron_rl.loss.kl import kl_estimate, sequence_kl_loss
from megatron_rl.loss.regularise import bonus_tokens, entropy_bonus, squared_log_ratio
from megatron_rl.loss.streams import RlStreams


@dataclass(frozen=True)
class Term:
    """One summand of the loss, coefficient included."""

    values: Tensor
    """[T], finite inside mask, with its graph."""
    mask: Tensor
    """bool [T]: the tokens it is summed over."""


def regularised_tokens(safe: RlStreams, kept: Tensor, config: LossConfig) -> Tensor:
    """T, or its kept tokens. bool [T]"""
    return safe.loss_mask & kept if config.regulariser_tokens == "kept" else safe.loss_mask


def regulariser_term(safe: RlStreams, kept: Tensor, config: LossConfig) -> Term:
    """tau (log r)^2 over the tokens that are regularised."""
    values = config.tau * squared_log_ratio(safe.policy_logp, safe.engine_logp)
    return Term(values, regularised_tokens(safe, kept, config))


def kl_term(safe: RlStreams, config: LossConfig, coef: float | None) -> Term | None:
    """coef times the KL estimate, None if the loss has no such term. coef None: config.kl.coef.

    With placement reward the coefficient is in the advantages and coef is not read. ValueError: a coef that is negative
    or not finite, or that no KL term reads.
    """
    if config.kl is None and coef is not None:
        raise ValueError(f"kl_coef has no effect without loss.kl, got {coef}; set loss.kl, or pass None")
    if config.kl is None or config.kl.placement != "loss":
        return None
    coef = config.kl.coef if coef is None else coef
    if not 0 <= coef < math.inf:
        raise ValueError(f"kl_coef must be finite and not negative, got {coef}; loss.kl.coef is where it starts")
    assert safe.reference_logp is not None, "checked with the streams"
    if config.kl.sequence_exact:
        assert safe.sequence_ids is not None, "checked with the streams"
        kl = sequence_kl_loss(safe.policy_logp, safe.reference_logp, safe.sequence_ids, kind=config.kl.kind)
    else:
        kl = kl_estimate(safe.policy_logp, safe.reference_logp, config.kl.kind)
    return Term(coef * kl, safe.loss_mask)


def entropy_term(safe: RlStreams, given: RlStreams, config: LossConfig) -> Term | None:
    """-coef H over the tokens that get the bonus, None without one. given: the streams before they were made safe,
    since a token whose engine log-prob is missing is no observation."""
    if config.entropy is None:
        return None
    assert safe.entropy is not None, "checked with the streams"
    sampled = given.loss_mask | given.distilled
    chosen = bonus_tokens(sampled, given.sequence_ids, tokens=config.entropy.tokens) & safe.loss_mask
    return Term(config.entropy.coef * entropy_bonus(safe.entropy, chosen), chosen)


def distill_term(safe: RlStreams, coef: float) -> Term | None:
    """coef times the KL to the teacher over F, None without distilled tokens.

    ValueError: a coef that is negative or not finite.
    """
    if safe.distill_kl is None:
        return None
    if not 0 <= coef < math.inf:
        raise ValueError(f"distill_coef must be finite and not negative, got {coef}; 1 is the usual weight")
    return Term(coef * safe.distill_kl, safe.distilled)
