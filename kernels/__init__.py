"""Kernels and their references; imports torch and triton only. Installed as megatron_rl_kernels."""

from megatron_rl_kernels.linear_distill import linear_distill
from megatron_rl_kernels.linear_logprob import LogprobOut, linear_logprob

__all__ = ["LogprobOut", "linear_distill", "linear_logprob"]
