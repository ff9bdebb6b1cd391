"""Terms that hold the policy where its data came from."""

import torch
from torch import Tensor

from megatron_rl.loss.reduce import check_streams


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
