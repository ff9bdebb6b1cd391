"""KL(policy || reference) from the sampled tokens: estimators, their gradients as losses, an adaptive coefficient.

l = log p_ref - log p of a token that the policy drew. (Schulman, Approximating KL divergence, 2020)

| kind | value | unbiased | expected gradient as a loss |
|---|---|---|---|
| k1 | -l | yes, with the largest spread | 0: noise only |
| k2 | l^2 / 2 | no: the KL near 0, more further out | that of KL(policy || reference) |
| k3 | e^l - 1 - l, never negative | yes | that of KL(reference || policy) |
| k1+, k2+, k3+ | as without the + | as without the + | that of k2 |

All of it holds for tokens of the policy itself; those of an older policy bring the bias of their age.
"""

import math
from typing import Literal

import torch
from torch import Tensor

from megatron_rl.loss.reduce import check_streams
from megatron_rl.loss.sequences import later_sum

KlKind = Literal["k1", "k2", "k3", "k1+", "k2+", "k3+"]

MAX_LOG_RATIO = 10.0
"""k3 clamps l to +- this before exp."""


def kl_estimate(logp: Tensor, ref_logp: Tensor, kind: KlKind) -> Tensor:
    """The estimator's value per token in nats, differentiable in logp; the table above says what each descends. [T]

    The clamp of k3 guards exp and switches no pull off: outside it the slope is the one at its edge.
    ValueError: shapes that disagree, an unknown kind.
    """
    check_streams(logp=logp, ref_logp=ref_logp)
    log_ratio = ref_logp.detach() - logp
    if kind.endswith("+"):
        value = _estimate(log_ratio.detach(), kind.removesuffix("+"))
        squared = _estimate(log_ratio, "k2")
        return value + (squared - squared.detach())
    return _estimate(log_ratio, kind)


def sequence_kl_loss(logp: Tensor, ref_logp: Tensor, sequence_ids: Tensor, *, kind: KlKind = "k3+") -> Tensor:
    """Per-token loss whose summed gradient is, on average, that of the KL between whole sequences. [T]

    d KL / d theta = E[sum_t (k1_t + KL of the tokens after t) d log p_t]: k2's gradient, and REINFORCE on what the
    token leads to. The later KL is summed as k3, which is unbiased too and has far less spread than k1 near the
    reference. The value is that of kind, which must have k2's gradient.
    sequence_ids int [T]: the document of each token; 0 without gradient where negative.
    ValueError: shapes that disagree, sequence_ids that are no integers, k1, k3 or an unknown kind.
    """
    if kind in ("k1", "k3"):
        raise ValueError(f"the sequence gradient needs a kind with the gradient of k2, got {kind!r}; use k3+")
    counted = sequence_ids >= 0
    logp, ref_logp = torch.where(counted, logp, 0.0), torch.where(counted, ref_logp, 0.0)
    later = later_sum(kl_estimate(logp.detach(), ref_logp, "k3"), sequence_ids)
    return kl_estimate(logp, ref_logp, kind) + later * (logp - logp.detach())


class AdaptiveKL:
    """A coefficient that rises while the measured KL is above target and falls while below. (Ziegler et al. 2019)"""

    def __init__(self, target: float, coef: float) -> None:
        """ValueError unless both are above 0 and finite."""
        for name, value in (("target", target), ("coef", coef)):
            if not 0 < value < math.inf:
                raise ValueError(f"{name} of the adaptive KL must be above 0, got {value}; it is in nats per token")
        self.target, self.coef = target, coef

    def update(self, kl: float) -> float:
        """The coefficient after a step whose mean KL per token was kl: coef *= 1 + clip(kl / target - 1, -.2, .2) / 10.

        ValueError unless kl is finite.
        """
        if not math.isfinite(kl):
            raise ValueError(f"the measured KL must be finite, got {kl}; keep the coefficient in a step without tokens")
        self.coef *= 1 + min(max(kl / self.target - 1, -0.2), 0.2) / 10
        return self.coef


def _estimate(log_ratio: Tensor, kind: str) -> Tensor:
    if kind == "k1":
        return -log_ratio
    if kind == "k2":
        return log_ratio.square() / 2
    if kind == "k3":
        beyond = (log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO) - log_ratio).detach()
        clamped = log_ratio + beyond
        # expm1(l) - l keeps the digits of small l, where e^l - 1 - l is l^2 / 2.
        return torch.expm1(clamped) - clamped
    raise ValueError(f"kind must be k1, k2, k3, k1+, k2+ or k3+, got {kind!r}")
