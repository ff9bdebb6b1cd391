"""Metrics of the RL loss: formed on the device, read in one transfer together with the counts of broken values.

| metric | kind | what |
|---|---|---|
| loss/total, loss/policy, loss/regulariser, loss/distill | Sum | shares of the step's loss |
| kl/loss, entropy/bonus | Sum | shares of the step's loss, coefficients included |
| kl/reference_k3 | Mean | KL to the reference per token, in nats, if reference_logp is given |
| ratio/mean | Mean | uncapped policy / engine, 1 on average on-policy |
| ratio/capped_mean, ratio/capped_square_mean | Mean | weight of a push and its square, behind mask and guards |
| ratio/engine_mean | Mean | uncapped proximal / engine, with config.proximal |
| log_ratio/abs_mean, log_ratio/abs_max | Mean, Max | of abs(log r), in nats |
| log_ratio/movement_abs_mean, log_ratio/engine_abs_mean | Mean | of its two factors, with config.proximal |
| mask/share, mask/share_positive, mask/share_negative | Mean | not pushed, of tokens with A != 0, A > 0, A < 0 |
| guard/share | Mean | tokens whose weight a guard changed, if there is one |
| gradient_scale/mean, gradient_scale/share_scaled | Mean | c, and c < 1, of pushed tokens with A != 0 |
| regulariser/max_weight | Max | largest abs(2 tau log r) of a token that is regularised |
| tokens/trained, tokens/missing_logp, tokens/distilled | Sum | sizes of T, of what left it, of F |
| entropy | Mean | in nats, if given |
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.loss.config import LossConfig
from megatron_rl.loss.kl import kl_estimate
from megatron_rl.loss.policy import PolicyStats
from megatron_rl.loss.reduce import masked_max, masked_sum, raise_broken
from megatron_rl.loss.streams import RlStreams
from megatron_rl.loss.terms import regularised_tokens
from megatron_rl.telemetry.values import Max, Mean, Sum, Value


@dataclass(frozen=True)
class PendingMean:
    """A Mean whose two numbers are still on the device."""

    total: Tensor
    count: Tensor


@dataclass(frozen=True)
class Pending:
    """A metric of one number that is still on the device."""

    kind: type[Sum] | type[Max]
    value: Tensor


Measured = dict[str, Pending | PendingMean]


def token_metrics(safe: RlStreams, stats: PolicyStats, config: LossConfig) -> Measured:
    """Ratio, mask, guards, gradient bound, regulariser, KL, entropy and sizes."""
    trained, size = safe.loss_mask, safe.loss_mask.sum()
    rising, falling = trained & (safe.advantages > 0), trained & (safe.advantages < 0)
    pushed = (rising | falling) & stats.kept
    log_ratio = safe.policy_logp.detach() - safe.engine_logp
    measured: Measured = {
        "tokens/trained": Pending(Sum, size),
        "ratio/mean": _mean_ratio(log_ratio, trained),
        "ratio/capped_mean": PendingMean(masked_sum(stats.weight, trained), size),
        "ratio/capped_square_mean": PendingMean(masked_sum(stats.weight.double().square(), trained), size),
        "log_ratio/abs_mean": PendingMean(masked_sum(log_ratio.abs(), trained), size),
        "log_ratio/abs_max": Pending(Max, masked_max(log_ratio.abs(), trained)),
        "mask/share": _share(~stats.kept, rising | falling),
        "mask/share_positive": _share(~stats.kept, rising),
        "mask/share_negative": _share(~stats.kept, falling),
        "gradient_scale/mean": PendingMean(masked_sum(stats.gradient_scale, pushed), pushed.sum()),
        "gradient_scale/share_scaled": _share(stats.gradient_scale < 1, pushed),
    }
    regularised = regularised_tokens(safe, stats.kept, config)
    measured["regulariser/max_weight"] = Pending(Max, 2 * config.tau * masked_max(log_ratio.abs(), regularised))
    if config.guard.kind != "off" or (config.proximal is not None and config.proximal.guard.kind != "off"):
        measured["guard/share"] = _share(stats.guarded, trained)
    if config.proximal is not None and safe.proximal_logp is not None:
        measured |= _factor_metrics(safe.policy_logp.detach(), safe.proximal_logp, safe.engine_logp, trained)
    if safe.reference_logp is not None:
        k3 = kl_estimate(safe.policy_logp.detach(), safe.reference_logp, "k3")
        measured["kl/reference_k3"] = PendingMean(masked_sum(k3, trained), size)
    if safe.entropy is not None:
        measured["entropy"] = PendingMean(masked_sum(safe.entropy.detach(), trained), size)
    if safe.distill_kl is not None:
        measured["tokens/distilled"] = Pending(Sum, safe.distilled.sum())
    return measured


def read_metrics(
    pending: Mapping[str, Pending | PendingMean], broken: Mapping[str, tuple[Tensor, Tensor]]
) -> dict[str, Value]:
    """The metrics as values, after one transfer. BrokenValuesError if any of the broken (stream, flags) has a flag."""
    numbers = [flags.sum() for _, flags in broken.values()]
    for metric in pending.values():
        numbers += [metric.total, metric.count] if isinstance(metric, PendingMean) else [metric.value]
    read = iter(torch.stack([number.double() for number in numbers]).tolist())
    for name, (stream, flags) in broken.items():
        if next(read):
            raise_broken(name, stream, flags)
    return {
        name: Mean(next(read), next(read)) if isinstance(metric, PendingMean) else metric.kind(next(read))
        for name, metric in pending.items()
    }


def _factor_metrics(policy_logp: Tensor, proximal_logp: Tensor, engine_logp: Tensor, trained: Tensor) -> Measured:
    movement, engine = policy_logp - proximal_logp, proximal_logp - engine_logp
    return {
        "ratio/engine_mean": _mean_ratio(engine, trained),
        "log_ratio/movement_abs_mean": PendingMean(masked_sum(movement.abs(), trained), trained.sum()),
        "log_ratio/engine_abs_mean": PendingMean(masked_sum(engine.abs(), trained), trained.sum()),
    }


def _mean_ratio(log_ratio: Tensor, trained: Tensor) -> PendingMean:
    # In float64, since exp of a float32 log-ratio above 88 is infinite.
    return PendingMean(masked_sum(log_ratio.double().exp(), trained), trained.sum())


def _share(hits: Tensor, among: Tensor) -> PendingMean:
    return PendingMean((hits & among).sum(), among.sum())
