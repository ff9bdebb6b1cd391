"""The CPU's SwiGLU: its kernel, and the feed-forward part of layers without experts and of shared experts."""

from copy import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class SwiGluMLP(MLP):
    """Megatron's MLP, its parameters and checkpoint layout, with the kernel below. Split over tp_group."""

    def __init__(self, config: TransformerConfig, *, inner_size: int, tp_group: dist.ProcessGroup) -> None:
        # Megatron takes the second matrix's size from the config, whatever the argument says.
        config = copy(config)
        config.ffn_hidden_size = inner_size
        linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        super().__init__(config, linears, ffn_hidden_size=inner_size, tp_group=tp_group)

    def forward(self, hidden_states: Tensor, per_token_scale: None = None, **_unused: Any) -> tuple[Tensor, None]:
        """[tokens of this rank, 1, H] -> (the same shape, no bias)."""
        gate_up, _ = self.linear_fc1(hidden_states)
        return self.linear_fc2(SwiGlu.apply(gate_up))[0], None


class SwiGlu(torch.autograd.Function):
    """silu(gate) * up of [..., gate | up]. Keeps only its input. (Shazeer 2020)"""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor]:
        (grad,) = grads
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        grad_gate_up = torch.empty_like(gate_up)
        grad_gate, grad_up = grad_gate_up.chunk(2, dim=-1)
        torch.mul(F.silu(gate), grad, out=grad_up)
        torch.mul(grad, up, out=grad_gate)
        torch.ops.aten.silu_backward.grad_input(grad_gate, gate, grad_input=grad_gate)
        return (grad_gate_up,)
