"""Mixture of experts by index lists and grouped matrix products: the CPU's MoE layer.

A token's K choices are K rows; rows are sorted by expert, travel to the ranks that hold it, and come back to be summed.
"""

from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import all_to_all
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_rl.model.grouped import GroupedProduct
from megatron_rl.model.mlp import SwiGlu, SwiGluMLP
from megatron_rl.model.permute import Combine, Expand, Permute, all_counts, gather_rows, inverse_order, sum_rows
from megatron_rl.model.router import Router


class GroupedExperts(MegatronModule):
    """This rank's experts, cut over pg_collection.ep, and of each its slice of the inner size, cut over .expt_tp.

    linear_fc1_weight [experts, gate and up, inner, H] and linear_fc2_weight [experts, H, inner].
    """

    def __init__(self, config: TransformerConfig, pg_collection: ProcessGroupCollection) -> None:
        super().__init__(config)
        self.ep_group, self.etp_group = pg_collection.ep, pg_collection.expt_tp
        self.expert_dp_group = pg_collection.expt_dp
        assert config.num_moe_experts and config.moe_ffn_hidden_size, "an MoE layer has experts"
        num_experts = config.num_moe_experts // self.ep_group.size()
        hidden, inner = config.hidden_size, config.moe_ffn_hidden_size // self.etp_group.size()
        dtype = config.params_dtype
        self.linear_fc1_weight = torch.nn.Parameter(torch.empty(num_experts, 2, inner, hidden, dtype=dtype))
        self.linear_fc2_weight = torch.nn.Parameter(torch.empty(num_experts, hidden, inner, dtype=dtype))

    def forward(self, rows_RH: Tensor, rows_per_expert: Tensor) -> Tensor:
        """SwiGLU of each row by its expert, this rank's part of the sum over .expt_tp. [R, H]

        rows_RH is sorted by expert; rows_per_expert int64 [experts].
        """
        num_rows = rows_per_expert.tolist()
        gate_up = GroupedProduct.apply(rows_RH, self.linear_fc1_weight.flatten(1, 2), num_rows)
        return GroupedProduct.apply(SwiGlu.apply(gate_up), self.linear_fc2_weight, num_rows)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, ShardedTensor]:
        """Checkpoint layout: whole stacks of all experts, below the axes that sharded_offsets prepends."""
        axis = len(sharded_offsets)
        expert_offset = (axis, self.ep_group.rank(), self.ep_group.size())
        inner_offset = (axis + 2, self.etp_group.rank(), self.etp_group.size())
        return {
            f"{prefix}{name}": ShardedTensor.from_rank_offsets(
                f"{prefix}{name}",
                parameter,
                *sharded_offsets,
                expert_offset,
                inner_offset,
                replica_id=(0, 0, self.expert_dp_group.rank()),
                prepend_axis_num=axis,
            )
            for name, parameter in self.named_parameters()
        }


class ExpertLayer(MegatronModule):
    """Router, experts, the way between them, and the expert that every token passes if the model has one."""

    def __init__(self, config: TransformerConfig, *, pg_collection: ProcessGroupCollection) -> None:
        super().__init__(config)
        self.ep_group, self.etp_group = pg_collection.ep, pg_collection.expt_tp
        self.stays_here = self.ep_group.size() == self.etp_group.size() == 1
        self.router = Router(config)
        self.experts = GroupedExperts(config, pg_collection)
        self.num_local_experts = len(self.experts.linear_fc1_weight)
        self.num_experts = self.num_local_experts * self.ep_group.size()
        inner = config.moe_shared_expert_intermediate_size
        self.shared_experts = SwiGluMLP(config, inner_size=inner, tp_group=pg_collection.tp) if inner else None

    def forward(self, hidden_states: Tensor, **_unused: Any) -> tuple[Tensor, None]:
        """[tokens of this rank, 1, H] -> (the same shape, no bias)."""
        hidden_NH = hidden_states.flatten(0, 1)
        experts_NK, weights_NK = self.router(hidden_NH)
        chosen = experts_NK.flatten()
        row_order = chosen.argsort(stable=True)
        row_of_choice = inverse_order(row_order)
        rows_per_expert = chosen.bincount(minlength=self.num_experts)
        rows = Expand.apply(hidden_NH, row_order, row_of_choice, experts_NK.shape[1])
        if self.stays_here:
            rows = self.experts(rows, rows_per_expert)
        else:
            rows = self._through_expert_ranks(rows, rows_per_expert)
        mixed = Combine.apply(rows, weights_NK.to(rows.dtype), row_order, row_of_choice).view_as(hidden_states)
        if self.shared_experts is not None:
            mixed = mixed + self.shared_experts(hidden_states)[0]
        return mixed, None

    def _through_expert_ranks(self, rows: Tensor, rows_per_expert: Tensor) -> Tensor:
        """Sends rows (sorted by global expert) to the experts' ranks, applies them, brings the rows back.

        Ranks that share the slices of the same experts bring together all their rows, and each gets its own back,
        summed over the slices.
        """
        num_local, ep_size = self.num_local_experts, self.ep_group.size()
        mine = slice(self.ep_group.rank() * num_local, (self.ep_group.rank() + 1) * num_local)
        arriving = all_counts(rows_per_expert, self.ep_group)[:, mine].contiguous()
        sends, receives = rows_per_expert.view(ep_size, -1).sum(1).tolist(), arriving.sum(1).tolist()
        arrived = all_to_all(self.ep_group, rows, receives, sends)
        counts = all_counts(arriving, self.etp_group)
        num_rows = counts.sum((1, 2)).tolist()
        gathered = gather_rows(arrived, num_rows, self.etp_group)
        expert_of_row = torch.arange(num_local).repeat(counts[..., 0].numel()).repeat_interleave(counts.flatten())
        order = expert_of_row.argsort(stable=True)
        inverse = inverse_order(order)
        done = self.experts(Permute.apply(gathered, order, inverse), counts.sum((0, 1)))
        own = sum_rows(Permute.apply(done, inverse, order), num_rows, self.etp_group)
        return all_to_all(self.ep_group, own, sends, receives)
