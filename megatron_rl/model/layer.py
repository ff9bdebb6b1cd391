"""The CPU's transformer layer: Megatron's attention and parallel linears with this project's norm, kernels and MoE."""

from typing import Any

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from megatron_rl.config import ConfigError
from megatron_rl.model.attention import PackedAttention
from megatron_rl.model.experts import ExpertLayer
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
        pg_collection: ProcessGroupCollection,
        **kwargs: Any,
    ) -> None:
        super().__init__(config, submodules, layer_number, pg_collection=pg_collection, **kwargs)
        # Megatron hands process groups only to MLP classes of its own, so the spec leaves this one out.
        self.mlp = ExpertLayer(config, pg_collection=pg_collection)

    def forward(
        self, hidden_states: Tensor, *_unused_args: Any, packed_seq_params: PackedDocuments, **_unused: Any
    ) -> tuple[Tensor, None]:
        """[tokens of this rank, 1, H] -> (the same shape, no context)."""
        attended, _ = self.self_attention(
            self.input_layernorm(hidden_states), attention_mask=None, packed_seq_params=packed_seq_params
        )
        hidden_states = hidden_states + attended
        mixed, _ = self.mlp(self.pre_mlp_layernorm(hidden_states))
        return hidden_states + mixed, None


def cpu_block_spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    """Every layer of the block and its final norm. ConfigError for sizes that torch's grouped product refuses."""
    for name, size in (("hidden_size", config.hidden_size), ("moe_intermediate_size", config.moe_ffn_hidden_size)):
        if (size or 0) * config.params_dtype.itemsize % 16:
            raise ConfigError(
                f"{name} must make rows of a multiple of 16 bytes on the CPU, got {size} of {config.params_dtype}; "
                "choose a model whose sizes are multiples of 8"
            )
    attention = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear,  # type: ignore[arg-type]
        core_attention=PackedAttention,  # type: ignore[arg-type]
        linear_proj=RowParallelLinear,
        q_layernorm=RMSNorm,
        k_layernorm=RMSNorm,
    )
    layer = ModuleSpec(
        module=PackedLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=ModuleSpec(
                module=SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=attention
            ),
            pre_mlp_layernorm=RMSNorm,
        ),
    )
    return TransformerBlockSubmodules(layer_specs=[layer] * config.num_layers, layer_norm=RMSNorm)  # type: ignore[arg-type]
