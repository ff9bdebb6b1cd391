"""The CPU's transformer layer: Megatron's attention and parallel linears with this project's norm, kernels and MoE."""

from typing import Any

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import checkpoint
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from megatron_rl.model.attention import PackedAttention
from megatron_rl.model.experts import ExpertLayer
from megatron_rl.model.mlp import SwiGluMLP
from megatron_rl.model.norm import RMSNorm
from megatron_rl.model.packed import PackedDocuments


class PackedLayer(TransformerLayer):
    """Pre-norm residual layer over packed documents, without dropout."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: TransformerLayerSubmodules,
        layer_number: int = 1,
        *,
        has_experts: bool,
        pg_collection: ProcessGroupCollection,
        **kwargs: Any,
    ) -> None:
        super().__init__(config, submodules, layer_number, pg_collection=pg_collection, **kwargs)
        # Megatron hands process groups only to MLP classes of its own, so the spec leaves this one out.
        if has_experts:
            self.mlp = ExpertLayer(config, pg_collection=pg_collection)
        else:
            inner = config.ffn_hidden_size
            assert inner is not None, "a layer without experts has an inner size"
            self.mlp = SwiGluMLP(config, inner_size=inner, tp_group=pg_collection.tp)
        recomputed = config.recompute_modules or [] if config.recompute_granularity == "selective" else []
        self.recompute_mlp = ("moe" if has_experts else "mlp") in recomputed

    def forward(
        self, hidden_states: Tensor, *_unused_args: Any, packed_seq_params: PackedDocuments, **_unused: Any
    ) -> tuple[Tensor, None]:
        """[tokens of this rank, 1, H] -> (the same shape, no context)."""
        attended, _ = self.self_attention(
            self.input_layernorm(hidden_states), attention_mask=None, packed_seq_params=packed_seq_params
        )
        hidden_states = hidden_states + attended
        if self.recompute_mlp and self.training:
            return hidden_states + checkpoint(self._feed_forward, False, hidden_states), None
        return hidden_states + self._feed_forward(hidden_states), None

    def _feed_forward(self, hidden_states: Tensor) -> Tensor:
        return self.mlp(self.pre_mlp_layernorm(hidden_states))[0]


def cpu_block_spec(config: TransformerConfig, layers: range) -> TransformerBlockSubmodules:
    """The layers of this number, counted over the whole model from 0, and the final norm."""
    frequency = config.moe_layer_freq
    specs = {has_experts: _layer_spec(config, has_experts=has_experts) for has_experts in (False, True)}
    has_experts = [layer % frequency == 0 if isinstance(frequency, int) else bool(frequency[layer]) for layer in layers]
    return TransformerBlockSubmodules(layer_specs=[specs[x] for x in has_experts], layer_norm=RMSNorm)  # type: ignore[arg-type]


def _layer_spec(config: TransformerConfig, *, has_experts: bool) -> ModuleSpec:
    qk_norm = RMSNorm if config.qk_layernorm else None
    attention = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear,  # type: ignore[arg-type]
        core_attention=PackedAttention,  # type: ignore[arg-type]
        linear_proj=RowParallelLinear,
        q_layernorm=qk_norm,  # type: ignore[arg-type]
        k_layernorm=qk_norm,  # type: ignore[arg-type]
    )
    return ModuleSpec(
        module=PackedLayer,
        params={"has_experts": has_experts},
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=ModuleSpec(
                module=SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=attention
            ),
            pre_mlp_layernorm=RMSNorm,
        ),
    )
