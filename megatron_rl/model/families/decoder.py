"""What the families share: a pre-norm decoder of grouped-query attention and SwiGLU experts, read from config.json.

A family's file turns config.json into a Decoder, refuses what its architecture has beyond that, and sets the router.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F

from megatron_rl.config import ConfigError
from megatron_rl.distributed.config import ParallelConfig
from megatron_rl.model.families.family import HfConfig
from megatron_rl.model.families.values import need, rope_setting, rope_type, setting
from megatron_rl.model.stages import stage_layers

Rule = tuple[str, Any, Any]
"""(name of the option, its value, the value that is supported)"""


@dataclass(frozen=True)
class Decoder:
    """config.json under this project's names."""

    num_layers: int
    hidden: int
    vocab: int
    max_positions: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_epsilon: float
    rope_base: float
    num_experts: int
    experts_per_token: int
    expert_hidden: int
    """Inner size of one expert."""
    dense_hidden: int
    """Inner size of the feed-forward part of a layer without experts."""
    rotary_share: float = 1.0
    """Share of each head's dimensions, the first ones, that RoPE turns."""
    num_dense_layers: int = 0
    """The first layers, which have no experts."""
    shared_hidden: int = 0
    """Inner size of the expert that every token passes besides its own; 0 for none."""
    expert_bias: bool = False
    """Each expert has a constant that is added to its score when experts are chosen, and only then."""
    qkv_bias: bool = False
    qk_norm: bool = True
    tied: bool = False
    """The head is the embedding."""


def shared_sizes(hf_config: HfConfig) -> dict[str, Any]:
    """The fields of Decoder that every architecture spells alike."""
    hidden, heads = need(hf_config, "hidden_size"), need(hf_config, "num_attention_heads")
    return dict(
        num_layers=need(hf_config, "num_hidden_layers"),
        hidden=hidden,
        vocab=need(hf_config, "vocab_size"),
        max_positions=need(hf_config, "max_position_embeddings"),
        heads=heads,
        kv_heads=need(hf_config, "num_key_value_heads"),
        head_dim=setting(hf_config, "head_dim", hidden // heads),
        rope_base=rope_setting(hf_config, "rope_theta", 10000.0),
        experts_per_token=need(hf_config, "num_experts_per_tok"),
        expert_hidden=need(hf_config, "moe_intermediate_size"),
        tied=setting(hf_config, "tie_word_embeddings", False),
    )


def shared_rules(hf_config: HfConfig) -> list[Rule]:
    """Options that no family supports."""
    return [
        ("RoPE type", rope_type(hf_config), "default"),
        ("hidden_act", hf_config.get("hidden_act", "silu"), "silu"),
        ("attention_dropout", float(setting(hf_config, "attention_dropout", 0.0)), 0.0),
        ("quantization_config", hf_config.get("quantization_config"), None),
    ]


def check_decoder(decoder: Decoder, rules: Iterable[Rule], family: str) -> None:
    """ConfigError for options that would be computed wrongly and for sizes that contradict each other."""
    for name, value, supported in rules:
        if value != supported:
            raise ConfigError(
                f"config.json: {name} must be {supported!r} for a {family} here, got {value!r}; "
                "choose a model without it: training would compute something else than the model"
            )
    if decoder.head_dim < 2 or decoder.head_dim % 2:
        raise ConfigError(
            "head_dim, hidden_size // num_attention_heads where it is not set, must be even and above 0, got "
            f"{decoder.head_dim}; restore the original model's config.json"
        )
    if decoder.heads % decoder.kv_heads:
        raise ConfigError(
            f"num_attention_heads must be a multiple of num_key_value_heads, got {decoder.heads} and "
            f"{decoder.kv_heads}; restore the original model's config.json"
        )
    if decoder.experts_per_token > decoder.num_experts:
        raise ConfigError(
            f"num_experts_per_tok must be at most num_experts, got {decoder.experts_per_token} and "
            f"{decoder.num_experts}; restore the original model's config.json"
        )


def check_parallel(decoder: Decoder, parallel: ParallelConfig) -> None:
    """ConfigError for sizes that the layout does not divide, and for a pipeline stage without layers."""
    tensor, expert, expert_tensor = parallel.tensor, parallel.expert, parallel.expert_tensor
    for name, size, option, ways in (
        ("num_attention_heads", decoder.heads, "tensor", tensor),
        ("num_key_value_heads", decoder.kv_heads, "tensor", tensor),
        ("vocab_size", decoder.vocab, "tensor", tensor),
        ("intermediate_size", decoder.dense_hidden if decoder.num_dense_layers else 0, "tensor", tensor),
        ("moe_intermediate_size * n_shared_experts", decoder.shared_hidden, "tensor", tensor),
        ("num_experts", decoder.num_experts, "expert", expert),
        ("moe_intermediate_size", decoder.expert_hidden, "expert_tensor", expert_tensor),
    ):
        if size % ways:
            raise ConfigError(
                f"{name} must be a multiple of parallel.{option}, got {size} and {ways}; "
                f"choose a parallel.{option} that divides {size}"
            )
    stage_layers(decoder.num_layers, parallel.pipeline)


def transformer_kwargs(decoder: Decoder, **router: Any) -> dict[str, Any]:
    """Arguments of Megatron's TransformerConfig; router are those that begin with moe_router_."""
    layers_with_experts = [int(layer >= decoder.num_dense_layers) for layer in range(decoder.num_layers)]
    return dict(
        num_layers=decoder.num_layers,
        hidden_size=decoder.hidden,
        num_attention_heads=decoder.heads,
        num_query_groups=decoder.kv_heads,
        kv_channels=decoder.head_dim,
        ffn_hidden_size=decoder.dense_hidden,
        num_moe_experts=decoder.num_experts,
        moe_layer_freq=layers_with_experts if decoder.num_dense_layers else 1,
        moe_ffn_hidden_size=decoder.expert_hidden,
        moe_shared_expert_intermediate_size=decoder.shared_hidden or None,
        moe_router_topk=decoder.experts_per_token,
        moe_router_enable_expert_bias=decoder.expert_bias,
        layernorm_epsilon=decoder.norm_epsilon,
        normalization="RMSNorm",
        qk_layernorm=decoder.qk_norm,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=decoder.qkv_bias,
        **router,
    )


def model_kwargs(decoder: Decoder) -> dict[str, Any]:
    """Arguments of Megatron's GPTModel."""
    return dict(
        vocab_size=decoder.vocab,
        max_sequence_length=decoder.max_positions,
        rotary_base=decoder.rope_base,
        rotary_percent=decoder.rotary_share,
        share_embeddings_and_output_weights=decoder.tied,
    )
