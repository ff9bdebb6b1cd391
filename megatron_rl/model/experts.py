"""Mixture of experts by index lists and grouped matrix products: the CPU's MoE layer.

A token's K choices are K rows; rows are sorted by expert, travel to the rank that holds it, and come back to be summed.
Every reordering is a permutation, so its gradient is the inverse gather and nothing is scattered.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import all_to_all
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class Router(MegatronModule):
    """Scores tokens against experts in float32 and keeps the K best."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        assert config.num_moe_experts is not None, "an MoE layer has experts"
        self.top_k = config.moe_router_topk
        self.softmax_over_all = config.moe_router_pre_softmax
        self.weight = torch.nn.Parameter(
            torch.empty(config.num_moe_experts, config.hidden_size, dtype=config.params_dtype)
        )
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden_NH: Tensor) -> tuple[Tensor, Tensor]:
        """(expert numbers int64 [N, K], their weights float32 [N, K])."""
        logits_NE = F.linear(hidden_NH.float(), self.weight.float())
        if self.softmax_over_all:
            weights_NK, experts_NK = logits_NE.softmax(-1).topk(self.top_k)
        else:
            chosen_NK, experts_NK = logits_NE.topk(self.top_k)
            weights_NK = chosen_NK.softmax(-1)
        return experts_NK, weights_NK


class GroupedExperts(MegatronModule):
    """The experts of this rank as two stacks of matrices, [experts, out, in]; gate above up in linear_fc1_weight."""

    def __init__(self, config: TransformerConfig, pg_collection: ProcessGroupCollection) -> None:
        super().__init__(config)
        self.ep_group, self.expert_dp_group = pg_collection.ep, pg_collection.expt_dp
        assert config.num_moe_experts and config.moe_ffn_hidden_size, "an MoE layer has experts"
        num_local_experts = config.num_moe_experts // self.ep_group.size()
        hidden, inner = config.hidden_size, config.moe_ffn_hidden_size
        self.linear_fc1_weight = torch.nn.Parameter(
            torch.empty(num_local_experts, 2 * inner, hidden, dtype=config.params_dtype)
        )
        self.linear_fc2_weight = torch.nn.Parameter(
            torch.empty(num_local_experts, hidden, inner, dtype=config.params_dtype)
        )

    def forward(self, rows_RH: Tensor, rows_per_expert: Tensor) -> Tensor:
        """SwiGLU of each row by its expert. rows_RH is sorted by expert; rows_per_expert int64 [experts]. [R, H]"""
        ends = rows_per_expert.cumsum(0, dtype=torch.int32)
        gate_up = F.grouped_mm(rows_RH, self.linear_fc1_weight.transpose(1, 2), offs=ends)
        return F.grouped_mm(_SwiGlu.apply(gate_up), self.linear_fc2_weight.transpose(1, 2), offs=ends)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, ShardedTensor]:
        """Checkpoint layout: one tensor [layers, experts, out, in] whose expert axis is cut over the expert ranks."""
        axis = len(sharded_offsets)
        expert_offset = (axis, self.ep_group.rank(), self.ep_group.size())
        return {
            f"{prefix}{name}": ShardedTensor.from_rank_offsets(
                f"{prefix}{name}",
                parameter,
                *sharded_offsets,
                expert_offset,
                replica_id=(0, 0, self.expert_dp_group.rank()),
                prepend_axis_num=axis,
            )
            for name, parameter in self.named_parameters()
        }


class ExpertLayer(MegatronModule):
    """Router, experts and the way between them. Experts are split over pg_collection.ep, never inside."""

    def __init__(self, config: TransformerConfig, *, pg_collection: ProcessGroupCollection) -> None:
        super().__init__(config)
        self.ep_group = pg_collection.ep
        self.ep_size = self.ep_group.size()
        self.router = Router(config)
        self.experts = GroupedExperts(config, pg_collection)
        self.num_local_experts = len(self.experts.linear_fc1_weight)
        self.num_experts = self.num_local_experts * self.ep_size

    def forward(self, hidden_states: Tensor, **_unused: Any) -> tuple[Tensor, None]:
        """[tokens of this rank, 1, H] -> (the same shape, no bias)."""
        hidden_NH = hidden_states.flatten(0, 1)
        experts_NK, weights_NK = self.router(hidden_NH)
        chosen = experts_NK.flatten()
        row_order = chosen.argsort(stable=True)
        row_of_choice = _inverse(row_order)
        rows_per_expert = chosen.bincount(minlength=self.num_experts)
        rows = _Expand.apply(hidden_NH, row_order, row_of_choice, self.router.top_k)
        if self.ep_size == 1:
            rows = self.experts(rows, rows_per_expert)
        else:
            rows = self._through_expert_ranks(rows, rows_per_expert)
        return _Combine.apply(rows, weights_NK.to(rows.dtype), row_order, row_of_choice).view_as(hidden_states), None

    def _through_expert_ranks(self, rows: Tensor, rows_per_expert: Tensor) -> Tensor:
        """Sends rows (sorted by global expert) to the experts' ranks, applies them, brings the rows back."""
        counts = torch.empty(self.ep_size, *rows_per_expert.shape, dtype=torch.int64)
        dist.all_gather_into_tensor(counts.view(-1), rows_per_expert, group=self.ep_group)
        mine = slice(self.ep_group.rank() * self.num_local_experts, (self.ep_group.rank() + 1) * self.num_local_experts)
        received = counts[:, mine]
        sends = rows_per_expert.view(self.ep_size, -1).sum(1).tolist()
        receives = received.sum(1).tolist()
        arrived = all_to_all(self.ep_group, rows, receives, sends)
        expert_of_row = torch.arange(self.num_local_experts).repeat(self.ep_size).repeat_interleave(received.flatten())
        order = expert_of_row.argsort(stable=True)
        inverse = _inverse(order)
        done = self.experts(_Permute.apply(arrived, order, inverse), received.sum(0))
        return all_to_all(self.ep_group, _Permute.apply(done, inverse, order), sends, receives)


def _inverse(order: Tensor) -> Tensor:
    """inverse[order[i]] = i"""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))


class _Permute(torch.autograd.Function):
    """rows[order]; inverse is order's inverse permutation."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = grads
        return grad.index_select(0, ctx.saved_tensors[0]), None, None


class _Expand(torch.autograd.Function):
    """One row per choice, sorted by expert: row r is token row_order[r] // K. [N, H] -> [N * K, H]"""

    @staticmethod
    def forward(ctx: Any, hidden_NH: Tensor, row_order: Tensor, row_of_choice: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(row_of_choice)
        ctx.top_k = top_k
        return hidden_NH.index_select(0, row_order // top_k)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (grad,) = grads
        per_choice = grad.index_select(0, ctx.saved_tensors[0])
        return per_choice.unflatten(0, (-1, ctx.top_k)).sum(1), None, None, None


class _Combine(torch.autograd.Function):
    """Weighted sum of each token's rows. rows [N * K, H], weights [N, K] -> [N, H]"""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights_NK: Tensor, row_order: Tensor, row_of_choice: Tensor) -> Tensor:
        per_choice = rows.index_select(0, row_of_choice).unflatten(0, weights_NK.shape)
        ctx.save_for_backward(per_choice, weights_NK, row_order)
        return torch.bmm(weights_NK.unsqueeze(1), per_choice).squeeze(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (grad_NH,) = grads
        per_choice, weights_NK, row_order = ctx.saved_tensors
        grad_weights = torch.bmm(per_choice, grad_NH.unsqueeze(2)).squeeze(2)
        grad_rows = (weights_NK.unsqueeze(2) * grad_NH.unsqueeze(1)).flatten(0, 1).index_select(0, row_order)
        return grad_rows, grad_weights, None, None


class _SwiGlu(torch.autograd.Function):
    """silu(gate) * up of [R, gate | up]. Keeps only its input. (Shazeer 2020)"""

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
