"""RMSNorm that knows about sequence parallelism. (Zhang and Sennrich 2019)"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class RMSNorm(torch.nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_unused: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype))
        # Megatron sums gradients of parameters so marked over the tensor-parallel ranks, which see different tokens.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]"""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
