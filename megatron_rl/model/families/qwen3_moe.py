"""Qwen3MoeForCausalLM: grouped-query attention with per-head RMSNorm on q and k, and an MoE in every layer."""

from typing import Any

from megatron_rl.model.families import decoder
from megatron_rl.model.families.decoder import Decoder
from megatron_rl.model.families.family import Family, HfConfig
from megatron_rl.model.families.parts import weight_parts
from megatron_rl.model.families.values import check_values, need, setting


def _decoder(hf_config: HfConfig) -> Decoder:
    return Decoder(
        **decoder.shared_sizes(hf_config),
        norm_epsilon=setting(hf_config, "rms_norm_eps", 1e-6),
        num_experts=need(hf_config, "num_experts", "num_local_experts"),
        dense_hidden=need(hf_config, "intermediate_size", "moe_intermediate_size"),
    )


def _check(hf_config: HfConfig) -> None:
    check_values(hf_config)
    rules = [
        *decoder.shared_rules(hf_config),
        ("use_sliding_window", setting(hf_config, "use_sliding_window", False), False),
        ("attention_bias", setting(hf_config, "attention_bias", False), False),
        ("mlp_only_layers", setting(hf_config, "mlp_only_layers", []), []),
        ("decoder_sparse_step", setting(hf_config, "decoder_sparse_step", 1), 1),
    ]
    decoder.check_decoder(_decoder(hf_config), rules, "Qwen3-MoE")


def _transformer_kwargs(hf_config: HfConfig) -> dict[str, Any]:
    # Softmax over all experts first and no renormalisation, or softmax over the chosen ones: the same as renormalising
    # their probabilities.
    pre_softmax = not setting(hf_config, "norm_topk_prob", False)
    return decoder.transformer_kwargs(_decoder(hf_config), moe_router_pre_softmax=pre_softmax)


QWEN3_MOE = Family(
    architecture="Qwen3MoeForCausalLM",
    check=_check,
    check_parallel=lambda hf_config, parallel: decoder.check_parallel(_decoder(hf_config), parallel),
    transformer_kwargs=_transformer_kwargs,
    model_kwargs=lambda hf_config: decoder.model_kwargs(_decoder(hf_config)),
    weight_parts=lambda hf_config: weight_parts(_decoder(hf_config)),
    is_redundant=lambda hf_config, name: _decoder(hf_config).tied and name == "lm_head.weight",
)
