"""Qwen3MoeForCausalLM: grouped-query attention with per-head RMSNorm on q and k, and an MoE in every layer."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from megatron_rl.config import ConfigError
from megatron_rl.distributed.config import ParallelConfig
from megatron_rl.model.families.family import Family, HfConfig, WeightPart


@dataclass(frozen=True)
class _Sizes:
    """config.json under this project's names; older and newer spellings both read."""

    num_layers: int
    hidden: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    num_experts: int
    experts_per_token: int
    expert_hidden: int
    tied: bool


def _need(hf_config: HfConfig, *names: str) -> int:
    """The first of names that is set, a size: the same setting under its older and newer name."""
    for name in names:
        value = hf_config.get(name)
        if value is not None and not (type(value) is int and value > 0):
            raise ConfigError(
                f"config.json: {name} must be a whole number above 0, got {value!r}; restore the original model's file"
            )
        if value is not None:
            return value
    raise ConfigError(f"config.json of a Qwen3-MoE must set {' or '.join(names)}; restore the original model's file")


def _sizes(hf_config: HfConfig) -> _Sizes:
    hidden, heads = _need(hf_config, "hidden_size"), _need(hf_config, "num_attention_heads")
    return _Sizes(
        num_layers=_need(hf_config, "num_hidden_layers"),
        hidden=hidden,
        vocab=_need(hf_config, "vocab_size"),
        heads=heads,
        kv_heads=_need(hf_config, "num_key_value_heads"),
        head_dim=hf_config.get("head_dim") or hidden // heads,
        num_experts=_need(hf_config, "num_experts", "num_local_experts"),
        experts_per_token=_need(hf_config, "num_experts_per_tok"),
        expert_hidden=_need(hf_config, "moe_intermediate_size"),
        tied=bool(hf_config.get("tie_word_embeddings", False)),
    )


def _rope(hf_config: HfConfig) -> tuple[float, str]:
    """(base, kind). transformers 5 writes rope_parameters, earlier versions rope_theta and rope_scaling."""
    parameters = hf_config.get("rope_parameters") or {}
    scaling = hf_config.get("rope_scaling") or {}
    kind = parameters.get("rope_type") or scaling.get("rope_type") or scaling.get("type") or "default"
    base = parameters.get("rope_theta") or hf_config.get("rope_theta") or 10000.0
    return float(base), kind


def _check(hf_config: HfConfig) -> None:
    sizes = _sizes(hf_config)
    _, rope_kind = _rope(hf_config)
    rules: list[tuple[str, Any, Any]] = [
        ("RoPE type", rope_kind, "default"),
        ("use_sliding_window", bool(hf_config.get("use_sliding_window", False)), False),
        ("attention_bias", bool(hf_config.get("attention_bias", False)), False),
        ("hidden_act", hf_config.get("hidden_act", "silu"), "silu"),
        ("mlp_only_layers", list(hf_config.get("mlp_only_layers") or []), []),
        ("decoder_sparse_step", hf_config.get("decoder_sparse_step", 1), 1),
        ("attention_dropout", float(hf_config.get("attention_dropout") or 0.0), 0.0),
        ("quantization_config", hf_config.get("quantization_config"), None),
    ]
    for name, value, supported in rules:
        if value != supported:
            raise ConfigError(
                f"config.json: {name} must be {supported!r} for a Qwen3-MoE here, got {value!r}; "
                "choose a model without it: training would compute something else than the model"
            )
    if sizes.heads % sizes.kv_heads:
        raise ConfigError(
            f"num_attention_heads must be a multiple of num_key_value_heads, got {sizes.heads} and {sizes.kv_heads}; "
            "restore the original model's config.json"
        )
    if sizes.experts_per_token > sizes.num_experts:
        raise ConfigError(
            f"num_experts_per_tok must be at most num_experts, got {sizes.experts_per_token} and {sizes.num_experts}; "
            "restore the original model's config.json"
        )


def _check_parallel(hf_config: HfConfig, parallel: ParallelConfig) -> None:
    sizes = _sizes(hf_config)
    for name, size, option, ways in (
        ("num_attention_heads", sizes.heads, "tensor", parallel.tensor),
        ("num_key_value_heads", sizes.kv_heads, "tensor", parallel.tensor),
        ("vocab_size", sizes.vocab, "tensor", parallel.tensor),
        ("num_experts", sizes.num_experts, "expert", parallel.expert),
    ):
        if size % ways:
            raise ConfigError(
                f"{name} must be a multiple of parallel.{option}, got {size} and {ways}; "
                f"choose a parallel.{option} that divides {size}"
            )


def _transformer_kwargs(hf_config: HfConfig) -> dict[str, Any]:
    sizes = _sizes(hf_config)
    return dict(
        num_layers=sizes.num_layers,
        hidden_size=sizes.hidden,
        num_attention_heads=sizes.heads,
        num_query_groups=sizes.kv_heads,
        kv_channels=sizes.head_dim,
        ffn_hidden_size=hf_config.get("intermediate_size") or sizes.expert_hidden,
        num_moe_experts=sizes.num_experts,
        moe_router_topk=sizes.experts_per_token,
        moe_ffn_hidden_size=sizes.expert_hidden,
        # Softmax over all experts first and no renormalisation, or softmax over the chosen ones: the same as
        # renormalising their probabilities.
        moe_router_pre_softmax=not hf_config.get("norm_topk_prob", False),
        layernorm_epsilon=hf_config.get("rms_norm_eps", 1e-6),
        normalization="RMSNorm",
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=False,
    )


def _model_kwargs(hf_config: HfConfig) -> dict[str, Any]:
    sizes = _sizes(hf_config)
    return dict(
        vocab_size=sizes.vocab,
        max_sequence_length=_need(hf_config, "max_position_embeddings"),
        rotary_base=_rope(hf_config)[0],
        share_embeddings_and_output_weights=sizes.tied,
    )


def _qkv_part(weight: Tensor, which: str, sizes: _Sizes) -> Tensor:
    """q, k or v rows of a fused qkv shard. Megatron stores, per kv head: its query heads, then k, then v."""
    queries = sizes.heads // sizes.kv_heads
    begin, count = {"q": (0, queries), "k": (queries, 1), "v": (queries + 1, 1)}[which]
    by_kv_head = weight.view(-1, queries + 2, sizes.head_dim, sizes.hidden)
    return by_kv_head[:, begin : begin + count]


def _layer_parts(layer: int, sizes: _Sizes) -> list[WeightPart]:
    hf, mcore = f"model.layers.{layer}", f"decoder.layers.{layer}"
    attention, qkv = f"{hf}.self_attn", f"{mcore}.self_attention.linear_qkv"
    rows = {"q": sizes.heads * sizes.head_dim, "k": sizes.kv_heads * sizes.head_dim}
    rows["v"] = rows["k"]
    norms = (
        (f"{hf}.input_layernorm.weight", sizes.hidden, (f"{mcore}.input_layernorm.weight", f"{qkv}.layer_norm_weight")),
        (f"{hf}.post_attention_layernorm.weight", sizes.hidden, (f"{mcore}.pre_mlp_layernorm.weight",)),
        (f"{attention}.q_norm.weight", sizes.head_dim, (f"{mcore}.self_attention.q_layernorm.weight",)),
        (f"{attention}.k_norm.weight", sizes.head_dim, (f"{mcore}.self_attention.k_layernorm.weight",)),
    )
    parts = [WeightPart(name, (size,), params) for name, size, params in norms]
    for which, num_rows in rows.items():
        part = partial(_qkv_part, which=which, sizes=sizes)
        name = f"{attention}.{which}_proj.weight"
        parts.append(WeightPart(name, (num_rows, sizes.hidden), (f"{qkv}.weight",), "rows", part))
    parts.append(
        WeightPart(
            f"{attention}.o_proj.weight",
            (sizes.hidden, rows["q"]),
            (f"{mcore}.self_attention.linear_proj.weight",),
            "columns",
        )
    )
    parts.append(
        WeightPart(f"{hf}.mlp.gate.weight", (sizes.num_experts, sizes.hidden), (f"{mcore}.mlp.router.weight",))
    )
    return parts + [part for expert in range(sizes.num_experts) for part in _expert_parts(layer, expert, sizes)]


def _expert_parts(layer: int, expert: int, sizes: _Sizes) -> list[WeightPart]:
    hf, mcore = f"model.layers.{layer}.mlp.experts.{expert}", f"decoder.layers.{layer}.mlp.experts"
    inner, hidden = sizes.expert_hidden, sizes.hidden
    return [
        WeightPart(
            f"{hf}.gate_proj.weight",
            (inner, hidden),
            (f"{mcore}.linear_fc1",),
            part=lambda weight: weight[:inner],
            expert=expert,
        ),
        WeightPart(
            f"{hf}.up_proj.weight",
            (inner, hidden),
            (f"{mcore}.linear_fc1",),
            part=lambda weight: weight[inner:],
            expert=expert,
        ),
        WeightPart(f"{hf}.down_proj.weight", (hidden, inner), (f"{mcore}.linear_fc2",), expert=expert),
    ]


def _weight_parts(hf_config: HfConfig) -> list[WeightPart]:
    sizes = _sizes(hf_config)
    vocabulary = (sizes.vocab, sizes.hidden)
    parts = [
        WeightPart("model.embed_tokens.weight", vocabulary, ("embedding.word_embeddings.weight",), "rows"),
        WeightPart("model.norm.weight", (sizes.hidden,), ("decoder.final_layernorm.weight",)),
    ]
    if not sizes.tied:
        parts.append(WeightPart("lm_head.weight", vocabulary, ("output_layer.weight",), "rows"))
    for layer in range(sizes.num_layers):
        parts += _layer_parts(layer, sizes)
    return sorted(parts, key=lambda part: part.name)


def _redundant_tensors(hf_config: HfConfig) -> dict[str, tuple[int, ...]]:
    sizes = _sizes(hf_config)
    return {"lm_head.weight": (sizes.vocab, sizes.hidden)} if sizes.tied else {}


QWEN3_MOE = Family(
    architecture="Qwen3MoeForCausalLM",
    check=_check,
    check_parallel=_check_parallel,
    transformer_kwargs=_transformer_kwargs,
    model_kwargs=_model_kwargs,
    weight_parts=_weight_parts,
    redundant_tensors=_redundant_tensors,
)
