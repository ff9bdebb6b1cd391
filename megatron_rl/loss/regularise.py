"""Terms that hold the policy where its data came from, or spread out."""

from typing import Literal

import torch
from torch import Tensor

from megatron_rl.loss.reduce import check_streams, fill_outside
from megatron_rl.loss.sequences import after_observation


def squared_log_ratio(policy_logp: Tensor, engine_logp: Tensor) -> Tensor:
    """(log r)^2 per token, in nats squared; slope 2 log r in policy_logp, not bounded. [T]

    0 without gradient where the engine's log-prob is NaN or infinite. ValueError: shapes that disagree.
    As a loss it draws p_theta back to p_mu, whichever way it drifted. (Kolibri report, 2026)
    """
    check_streams(policy_logp=policy_logp, engine_logp=engine_logp)
    known = engine_logp.isfinite()
    # Replaced in front of the difference, not behind: the slope of an unknown token must be 0, not 0 times NaN.
    policy_logp = torch.where(known, policy_logp, 0.0)
    return (policy_logp - torch.where(known, engine_logp, 0.0).detach()).square()


def bonus_tokens(
    loss_mask: Tensor, sequence_ids: Tensor | None, *, tokens: Literal["all", "after_observation"]
) -> Tensor:
    """Which tokens an entropy bonus is given for. bool [T]

    all: loss_mask. after_observation: those whose predecessor in the document is not in loss_mask, but for the
    document's first, which follows the prompt; the tokens where an agent decides what to make of what it was told.
    ValueError: shapes that disagree, sequence_ids missing where needed, an unknown choice.
    """
    if tokens == "all":
        return loss_mask
    if tokens != "after_observation":
        raise ValueError(f"tokens must be all or after_observation, got {tokens!r}")
    if sequence_ids is None:
        raise ValueError(
            "an entropy bonus after observations needs sequence_ids, got None; pass the document number of every token"
        )
    return after_observation(loss_mask, sequence_ids)


def entropy_bonus(entropy: Tensor, mask: Tensor) -> Tensor:
    """-H per token inside mask, 0 without gradient outside: as a loss it raises the entropy. [T], nats

    entropy is exact over the vocabulary at each visited prefix, so is the gradient p (log p + H) on the logits; what a
    token does to the entropy of later ones is left out. The optimum of E[r] + coef H is softmax(r / coef): the pull is
    towards the uniform distribution, mostly onto tokens that never should be written. ValueError: shapes that disagree.
    """
    check_streams(entropy=entropy, loss_mask=mask)
    return -fill_outside(entropy, mask)
