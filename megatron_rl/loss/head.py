"""Per-token streams to one scalar: what the trainer calls for each microbatch.

Values are checked here and nowhere below, so that a CUDA run waits for the device once per microbatch: the counts of
broken values ride with the metrics.
"""

from dataclasses import dataclass

from torch import Tensor

from megatron_rl.loss.config import LossConfig
from megatron_rl.loss.guard import NoiseTable
from megatron_rl.loss.measure import Pending, read_metrics, token_metrics
from megatron_rl.loss.policy import policy_loss
from megatron_rl.loss.reduce import (
    broken_logps,
    check_denominator,
    check_streams,
    masked_sum,
    raise_broken,
)
from megatron_rl.loss.streams import RlStreams, broken_values, check_rl_streams, safe_streams
from megatron_rl.loss.terms import Term, distill_term, entropy_term, kl_term, regulariser_term
from megatron_rl.telemetry.values import Sum, Value

__all__ = ["LossStats", "RlStreams", "rl_loss", "sft_loss"]


@dataclass(frozen=True)
class LossStats:
    """What a loss says about its tokens. Streams are [T] and detached."""

    policy_logp: Tensor
    """As given."""
    kept: Tensor
    """bool: False where the policy loss gives the token no push; True outside T."""
    gradient_scale: Tensor
    """c of the gradient bound; 1 outside T."""
    metrics: dict[str, Value]
    """The table in measure.py; merged over microbatches and ranks they describe the step."""


def rl_loss(
    streams: RlStreams,
    *,
    config: LossConfig,
    denominator: float,
    kl_coef: float | None = None,
    noise: NoiseTable | None = None,
    distill_coef: float = 1.0,
) -> tuple[Tensor, LossStats]:
    """The step's objective over one microbatch, a scalar, and its statistics.

    (sum over T of v (l_pg + tau (log r)^2 + kl_coef kl - coef H) + distill_coef * sum over F of v distill_kl)
    / denominator, each term where config asks for it, v the loss weight. T is trained_mask(loss_mask, engine_logp)
    without F. denominator comes from reduction_weights over all ranks and microbatches of the step, so that gradients
    add up to the same sum however whole documents are split. kl_coef: None is config.kl.coef; not read
    with placement reward. noise: the last calibration, for the guards shrink and derived.

    ValueError: shapes that disagree, a mask that is not bool, denominator not above 0 or not finite, a stream or table
    that config needs and that is None, a kl_coef without config.kl; inside T a log-prob that is NaN or above 0, an
    advantage, weight or entropy that is not finite, a document that comes back after another one; inside F a distill_kl
    that is not finite.
    """
    check_rl_streams(streams, config)
    check_denominator(denominator)
    safe = safe_streams(streams)
    per_token, stats = policy_loss(
        safe.policy_logp,
        safe.engine_logp,
        safe.advantages,
        config=config,
        sequence_ids=safe.sequence_ids,
        proximal_logp=safe.proximal_logp,
        noise=noise,
    )
    terms: dict[str, Term | None] = {
        "loss/policy": Term(per_token, safe.loss_mask),
        "loss/regulariser": regulariser_term(safe, stats.kept, config),
        "kl/loss": kl_term(safe, config, kl_coef),
        "entropy/bonus": entropy_term(safe, streams, config),
        "loss/distill": distill_term(safe, distill_coef),
    }
    shares = {name: _weighted(term, safe.loss_weight) / denominator for name, term in terms.items() if term is not None}
    loss = sum(shares.values(), start=safe.policy_logp.new_zeros(()))
    missing = streams.loss_mask & ~streams.trained & ~streams.distilled
    measured = {
        "loss/total": Pending(Sum, loss.detach()),
        **{name: Pending(Sum, share.detach()) for name, share in shares.items()},
        "tokens/missing_logp": Pending(Sum, missing.sum()),
        **token_metrics(safe, stats, config),
    }
    metrics = read_metrics(measured, broken_values(safe))
    return loss, LossStats(streams.policy_logp.detach(), stats.kept, stats.gradient_scale, metrics)


def _weighted(term: Term, loss_weight: Tensor | None) -> Tensor:
    return masked_sum(term.values if loss_weight is None else loss_weight * term.values, term.mask)


def sft_loss(policy_logp: Tensor, loss_mask: Tensor, *, denominator: float) -> Tensor:
    """Negative log-likelihood of the tokens in loss_mask over denominator, a scalar in nats. Both streams [T].

    denominator counts trained tokens over all ranks and microbatches of the step. Outside the mask log-probs may be
    NaN. ValueError: shapes that disagree, a mask that is not bool, denominator not above 0, a log-prob inside the mask
    that is NaN or above 0.
    """
    check_streams(policy_logp=policy_logp, loss_mask=loss_mask)
    check_denominator(denominator)
    broken = broken_logps(policy_logp, loss_mask)
    if bool(broken.any()):
        raise_broken("policy_logp", policy_logp, broken)
    return -masked_sum(policy_logp, loss_mask) / denominator
