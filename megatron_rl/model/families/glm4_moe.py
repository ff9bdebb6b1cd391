"""Glm4MoeForCausalLM (GLM-4.5, GLM-4.5-Air, GLM-4.6): sigmoid router with expert bias, shared expert, partial RoPE.

Files of the released models also hold a layer for multi-token prediction, model.layers.<num_hidden_layers>.*. It is no
part of the causal language model: transformers ignores it, and so does this project, which neither trains nor saves it.
"""

import re
from typing import Any

from megatron_rl.config import ConfigError
from megatron_rl.model.families import decoder
from megatron_rl.model.families.decoder import Decoder
from megatron_rl.model.families.family import Family, HfConfig
from megatron_rl.model.families.parts import weight_parts
from megatron_rl.model.families.values import check_values, need, rope_setting, setting

LAYER_NUMBER = re.compile(r"model\.layers\.(\d+)\.")


def _decoder(hf_config: HfConfig) -> Decoder:
    expert_hidden = need(hf_config, "moe_intermediate_size")
    return Decoder(
        **decoder.shared_sizes(hf_config),
        norm_epsilon=setting(hf_config, "rms_norm_eps", 1e-5),
        num_experts=need(hf_config, "n_routed_experts", "num_local_experts"),
        dense_hidden=need(hf_config, "intermediate_size"),
        rotary_share=rope_setting(hf_config, "partial_rotary_factor", 0.5),
        num_dense_layers=setting(hf_config, "first_k_dense_replace", 1),
        shared_hidden=expert_hidden * setting(hf_config, "n_shared_experts", 1),
        expert_bias=True,
        qkv_bias=setting(hf_config, "attention_bias", False),
        qk_norm=setting(hf_config, "use_qk_norm", False),
    )


def _check(hf_config: HfConfig) -> None:
    check_values(hf_config)
    sizes = _decoder(hf_config)
    # Megatron's sigmoid router divides the chosen scores by their sum exactly where a token has several experts.
    several = sizes.experts_per_token > 1
    rules = [*decoder.shared_rules(hf_config), ("norm_topk_prob", setting(hf_config, "norm_topk_prob", True), several)]
    decoder.check_decoder(sizes, rules, "GLM-4-MoE")
    _check_groups(hf_config, sizes)
    if sizes.num_dense_layers >= sizes.num_layers:
        raise ConfigError(
            f"first_k_dense_replace must leave layers with experts, got {sizes.num_dense_layers} of "
            f"{sizes.num_layers} layers; choose a mixture-of-experts model"
        )
    if sizes.head_dim * sizes.rotary_share % 2:
        raise ConfigError(
            "partial_rotary_factor must take an even number of each head's dimensions, got "
            f"{sizes.rotary_share} of {sizes.head_dim}; restore the original model's config.json"
        )


def _check_groups(hf_config: HfConfig, sizes: Decoder) -> None:
    groups, kept = _groups(hf_config)
    in_group = sizes.num_experts // groups
    if sizes.num_experts % groups or kept > groups or kept * in_group < sizes.experts_per_token:
        raise ConfigError(
            "n_group must divide the experts and topk_group of them hold num_experts_per_tok, got "
            f"{groups} groups of {sizes.num_experts} experts, {kept} kept, for {sizes.experts_per_token} experts; "
            "restore the original model's config.json"
        )
    # transformers scores a group by its two best experts, Megatron by as many as a token has for each group it keeps.
    if kept < groups and (in_group < 2 or sizes.experts_per_token // kept != 2):
        raise ConfigError(
            "where topk_group is below n_group, num_experts_per_tok must be twice topk_group, got "
            f"{sizes.experts_per_token} and {kept}; choose a model without expert groups: training would choose others"
        )


def _groups(hf_config: HfConfig) -> tuple[int, int]:
    """(groups of experts, those a token keeps)"""
    return setting(hf_config, "n_group", 1), setting(hf_config, "topk_group", 1)


def _transformer_kwargs(hf_config: HfConfig) -> dict[str, Any]:
    groups, kept = _groups(hf_config)
    limited = kept < groups
    return decoder.transformer_kwargs(
        _decoder(hf_config),
        moe_router_score_function="sigmoid",
        moe_router_topk_scaling_factor=float(setting(hf_config, "routed_scaling_factor", 1.0)),
        moe_router_num_groups=groups if limited else None,
        moe_router_group_topk=kept if limited else None,
    )


def _is_redundant(hf_config: HfConfig, name: str) -> bool:
    """The head of a tied model, and the layers for multi-token prediction that follow the model's own."""
    if name == "lm_head.weight":
        return _decoder(hf_config).tied
    found, num_layers = LAYER_NUMBER.match(name), need(hf_config, "num_hidden_layers")
    # null and 0 are none, but transformers takes a config.json that is silent for 1.
    num_extra = setting({"num_nextn_predict_layers": 1, **hf_config}, "num_nextn_predict_layers", 0)
    return found is not None and num_layers <= int(found[1]) < num_layers + num_extra


GLM4_MOE = Family(
    architecture="Glm4MoeForCausalLM",
    check=_check,
    check_parallel=lambda hf_config, parallel: decoder.check_parallel(_decoder(hf_config), parallel),
    transformer_kwargs=_transformer_kwargs,
    model_kwargs=lambda hf_config: decoder.model_kwargs(_decoder(hf_config)),
    weight_parts=lambda hf_config: weight_parts(_decoder(hf_config)),
    is_redundant=_is_redundant,
)
