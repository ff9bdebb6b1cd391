"""Per-token streams to one scalar: what the trainer calls for each microbatch.

Values are checked here and nowhere below, so that a CUDA run waits for the device once per microbatch: the counts of
broken values ride with the metrics.
"""

from dataclasses import dataclass

from torch import Tensor

from megatron_rl.loss.config import LossConfig
from megatron_rl.loss.measure import Pending, PendingMean, RlTokens, read_metrics, token_metrics
from megatron_rl.loss.policy import policy_loss
from megatron_rl.loss.reduce import (
    broken_logps,
    check_denominator,
    check_streams,
    fill_outside,
    masked_max,
    masked_sum,
    raise_broken,
    trained_mask,
)
from megatron_rl.loss.regularise import squared_log_ratio
from megatron_rl.telemetry.values import Max, Sum, Value


@dataclass(frozen=True)
class LossStats:
    """What a loss says about its tokens. Streams are [T] and detached."""

    policy_logp: Tensor
    """As given."""
    kept: Tensor
    """bool: False where B-TV masked the token; True outside T."""
    gradient_scale: Tensor
    """c of the gradient bound; 1 outside T."""
    metrics: dict[str, Value]
    """See rl_loss; merged over microbatches and ranks they describe the step."""


def rl_loss(
    policy_logp: Tensor,
    engine_logp: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    config: LossConfig,
    denominator: float,
    entropy: Tensor | None = None,
) -> tuple[Tensor, LossStats]:
    """(sum over T of l_pg + tau (log r)^2) / denominator, a scalar, and its statistics. All streams [T].

    T is trained_mask(loss_mask, engine_logp); denominator is its size over all ranks and microbatches of the step, so
    that gradients add up to the same sum however tokens are split. Outside T every stream may hold anything, NaN too.
    entropy is measured only.

    | metric | kind | what |
    |---|---|---|
    | loss/total, loss/policy, loss/regulariser | Sum | shares of the step's loss |
    | ratio/mean | Mean | uncapped r, 1 on average on-policy |
    | log_ratio/abs_mean, log_ratio/abs_max | Mean, Max | of \\|log r\\|, in nats |
    | mask/share, mask/share_positive, mask/share_negative | Mean | masked, of tokens with A != 0, A > 0, A < 0 |
    | gradient_scale/mean, gradient_scale/share_scaled | Mean | c, and c < 1, of unmasked tokens with A != 0 |
    | regulariser/max_weight | Max | largest \\|2 tau log r\\| of a token that is regularised |
    | tokens/trained, tokens/missing_logp | Sum | size of T; trained tokens without an engine log-prob |
    | entropy | Mean | in nats, if given |

    ValueError: shapes that disagree, a mask that is not bool, denominator not above 0; inside T a log-prob that is
    NaN or above 0, an advantage that is not finite.
    """
    check_streams(policy_logp=policy_logp, engine_logp=engine_logp, advantages=advantages, loss_mask=loss_mask)
    if entropy is not None:
        check_streams(policy_logp=policy_logp, entropy=entropy)
    check_denominator(denominator)
    trained = trained_mask(loss_mask, engine_logp)
    policy_in = fill_outside(policy_logp, trained)
    engine_in = fill_outside(engine_logp, trained).detach()
    advantages = advantages.detach()
    per_token, stats = policy_loss(policy_in, engine_in, advantages, config=config)
    tokens = RlTokens(policy_in.detach(), engine_in, advantages, trained, stats.kept, stats.gradient_scale)
    regularised = trained & stats.kept if config.regulariser_tokens == "kept" else trained
    policy_sum = masked_sum(per_token, trained) / denominator
    regulariser_sum = config.tau * masked_sum(squared_log_ratio(policy_in, engine_in), regularised) / denominator
    loss = policy_sum + regulariser_sum
    measured = {
        "loss/total": Pending(Sum, loss.detach()),
        "loss/policy": Pending(Sum, policy_sum.detach()),
        "loss/regulariser": Pending(Sum, regulariser_sum.detach()),
        "regulariser/max_weight": Pending(Max, 2 * config.tau * masked_max(tokens.log_ratio.abs(), regularised)),
        "tokens/missing_logp": Pending(Sum, (loss_mask & ~trained).sum()),
        **token_metrics(tokens),
    }
    if entropy is not None:
        measured["entropy"] = PendingMean(masked_sum(entropy.detach(), trained), trained.sum())
    metrics = read_metrics(measured, tokens)
    return loss, LossStats(policy_logp.detach(), stats.kept, stats.gradient_scale, metrics)


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
