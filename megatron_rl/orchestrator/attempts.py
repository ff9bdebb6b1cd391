"""Several attempts at each prompt: pass@k, and what interval a share over prompts deserves."""

import math
from collections.abc import Sequence

from megatron_rl.telemetry.values import Z_95, Rate


def pass_at_k(num_attempts: int, num_passed: int, k: int) -> float:
    """1 - C(n-c, k) / C(n, k): the share of k-subsets of a prompt's n attempts that hold one of the c that passed.

    Unbiased for the probability that k fresh attempts hold a pass. Exact integers, rounded once. (Chen et al. 2021)
    ValueError unless 0 <= c <= n and 1 <= k <= n.
    """
    if not 0 <= num_passed <= num_attempts:
        raise ValueError(
            f"num_passed must be between 0 and num_attempts, got {num_passed} of {num_attempts}; count attempts once"
        )
    if not 1 <= k <= num_attempts:
        raise ValueError(f"k must be between 1 and num_attempts, got {k} for {num_attempts}; draw more attempts")
    subsets = math.comb(num_attempts, k)
    return (subsets - math.comb(num_attempts - num_passed, k)) / subsets


def rate_over_prompts(shares: Sequence[float], *, trials: int) -> Rate:
    """The mean of one share in [0, 1] per prompt, with the count that makes its Wilson interval honest.

    Attempts at one prompt are not independent: an easy prompt passes them all. So the count is how many independent
    outcomes would spread as much as the mean of the prompts does: m(1-m) / (variance over prompts / prompts), times
    (z/t)^2 for a variance that is estimated from few prompts, rounded down; never below the number of prompts (what
    one attempt each is worth) and never above trials per prompt (what independent ones are). With trials 1, or where
    all prompts agree on 0 or 1, it is the number of prompts. (Effective sample size: Korn and Graubard 1998)
    """
    num_prompts, total = len(shares), math.fsum(shares)
    if num_prompts < 2 or trials == 1 or total in (0, num_prompts):
        return Rate(total, num_prompts)
    mean = total / num_prompts
    variance_of_mean = math.fsum((share - mean) ** 2 for share in shares) / (num_prompts - 1) / num_prompts
    most = trials * num_prompts
    factor = (Z_95 / _t_95(num_prompts - 1)) ** 2
    wanted = mean * (1 - mean) * factor / variance_of_mean if variance_of_mean > 0 else most
    count = math.floor(min(max(wanted, num_prompts), most))
    return Rate(mean * count, count)


def _t_95(degrees: int) -> float:
    """Two-sided 95% quantile of Student's t, by its expansion in 1/degrees; within 1% from 3 degrees on."""
    z = Z_95
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / degrees + second / degrees**2 + third / degrees**3
