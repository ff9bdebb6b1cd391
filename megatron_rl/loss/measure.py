"""Metrics of the RL loss: formed on the device, read in one transfer together with the counts of broken values."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.loss.reduce import broken_logps, masked_max, masked_sum, raise_broken
from megatron_rl.telemetry.values import Max, Mean, Sum, Value


@dataclass(frozen=True)
class RlTokens:
    """What one microbatch's loss saw, detached; [T]. Outside `trained` log-probs are 0."""

    policy_logp: Tensor
    engine_logp: Tensor
    advantages: Tensor
    trained: Tensor
    kept: Tensor
    gradient_scale: Tensor

    @property
    def log_ratio(self) -> Tensor:
        """log r, not clamped."""
        return self.policy_logp - self.engine_logp


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


def token_metrics(tokens: RlTokens) -> dict[str, Pending | PendingMean]:
    """Ratio, mask, gradient bound and size of T; the table in rl_loss says what each is."""
    trained, size = tokens.trained, tokens.trained.sum()
    distance = tokens.log_ratio.abs()
    rising, falling = trained & (tokens.advantages > 0), trained & (tokens.advantages < 0)
    pushed = (rising | falling) & tokens.kept
    return {
        "tokens/trained": Pending(Sum, size),
        # In float64, since exp of a float32 log-ratio above 88 is infinite.
        "ratio/mean": PendingMean(masked_sum(tokens.log_ratio.double().exp(), trained), size),
        "log_ratio/abs_mean": PendingMean(masked_sum(distance, trained), size),
        "log_ratio/abs_max": Pending(Max, masked_max(distance, trained)),
        "mask/share": _share(~tokens.kept, rising | falling),
        "mask/share_positive": _share(~tokens.kept, rising),
        "mask/share_negative": _share(~tokens.kept, falling),
        "gradient_scale/mean": PendingMean(masked_sum(tokens.gradient_scale, pushed), pushed.sum()),
        "gradient_scale/share_scaled": _share(tokens.gradient_scale < 1, pushed),
    }


def read_metrics(pending: Mapping[str, Pending | PendingMean], tokens: RlTokens) -> dict[str, Value]:
    """The metrics as values, after one transfer. ValueError if tokens hold a broken value inside T."""
    trained = tokens.trained
    broken = {
        "policy_logp": broken_logps(tokens.policy_logp, trained),
        "engine_logp": broken_logps(tokens.engine_logp, trained),
        "advantages": trained & ~tokens.advantages.isfinite(),
    }
    numbers = [flags.sum() for flags in broken.values()]
    for metric in pending.values():
        numbers += [metric.total, metric.count] if isinstance(metric, PendingMean) else [metric.value]
    read = iter(torch.stack([number.double() for number in numbers]).tolist())
    for name, flags in broken.items():
        if next(read):
            raise_broken(name, getattr(tokens, name), flags)
    return {
        name: Mean(next(read), next(read)) if isinstance(metric, PendingMean) else metric.kind(next(read))
        for name, metric in pending.items()
    }


def _share(hits: Tensor, among: Tensor) -> PendingMean:
    return PendingMean((hits & among).sum(), among.sum())
