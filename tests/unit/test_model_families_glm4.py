"""What a GLM-4-MoE's config.json may say, and what it means for Megatron."""

import math
from typing import Any

import pytest

from megatron_rl.config import ConfigError
from megatron_rl.distributed.config import ParallelConfig
from megatron_rl.model.families import family_for

AIR: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 46,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.0,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_qk_norm": False,
    "vocab_size": 151552,
}
"""config.json of GLM-4.5-Air, without what the model does not read."""
LARGE: dict[str, Any] = {
    **AIR,
    "first_k_dense_replace": 3,
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 160,
    "num_hidden_layers": 92,
    "routed_scaling_factor": 2.5,
    "use_qk_norm": True,
}
"""GLM-4.5 and GLM-4.6, with the context length of the former."""
GROUPED = {"n_group": 4, "topk_group": 4}
FAMILY = family_for(AIR)


@pytest.mark.parametrize(("config", "billions"), [(AIR, 106), (LARGE, 355)])
def test_released_models_are_accepted_with_the_parameters_they_are_known_for(
    config: dict[str, Any], billions: int
) -> None:
    FAMILY.check(config)
    parts = FAMILY.weight_parts(config)
    assert len({part.name for part in parts}) == len(parts)
    assert sum(math.prod(part.shape) for part in parts) == pytest.approx(billions * 1e9, rel=0.01)


def test_older_and_newer_spelling_describe_the_same_model() -> None:
    newer = {k: v for k, v in AIR.items() if k not in ("rope_theta", "rope_scaling", "partial_rotary_factor")}
    newer["rope_parameters"] = {"rope_theta": 1000000, "rope_type": "default", "partial_rotary_factor": 0.5}
    for describe in (FAMILY.transformer_kwargs, FAMILY.model_kwargs):
        assert describe(AIR) == describe(newer)
    assert FAMILY.model_kwargs(newer)["rotary_percent"] == 0.5
    assert FAMILY.model_kwargs({**newer, "rope_parameters": {"partial_rotary_factor": 0.25}})["rotary_percent"] == 0.25


def test_what_config_leaves_out_is_what_transformers_takes_for_it() -> None:
    from transformers import Glm4MoeConfig

    sizes = ("head_dim", "architectures", "rope_theta", "num_nextn_predict_layers")
    needed = {k: v for k, v in AIR.items() if k.endswith(("_size", "_heads", "_layers", "_experts", "_embeddings"))}
    silent = {**needed, **{k: AIR[k] for k in sizes}, "num_experts_per_tok": 8}
    spoken = Glm4MoeConfig(**{k: v for k, v in silent.items() if k != "architectures"}).to_dict()
    for describe in (FAMILY.transformer_kwargs, FAMILY.model_kwargs):
        assert describe(silent) == describe(spoken)


def test_the_router_and_the_kinds_of_layers_reach_megatron() -> None:
    kwargs = FAMILY.transformer_kwargs(LARGE)
    assert kwargs["moe_layer_freq"] == [0] * 3 + [1] * 89
    assert kwargs["moe_shared_expert_intermediate_size"] == 1536
    assert kwargs["ffn_hidden_size"] == 12288
    assert kwargs["qk_layernorm"] and kwargs["add_qkv_bias"] and kwargs["moe_router_enable_expert_bias"]
    assert (kwargs["moe_router_score_function"], kwargs["moe_router_topk_scaling_factor"]) == ("sigmoid", 2.5)
    assert FAMILY.transformer_kwargs({**LARGE, "n_shared_experts": 2})["moe_shared_expert_intermediate_size"] == 3072


@pytest.mark.parametrize(
    ("change", "groups"),
    [
        ({}, (None, None)),
        ({"n_group": 4, "topk_group": 4}, (None, None)),
        ({"n_group": 8, "topk_group": 4}, (8, 4)),
    ],
)
def test_groups_of_which_all_are_kept_are_none(change: dict[str, Any], groups: tuple) -> None:
    FAMILY.check({**AIR, **change})
    kwargs = FAMILY.transformer_kwargs({**AIR, **change})
    assert (kwargs["moe_router_num_groups"], kwargs["moe_router_group_topk"]) == groups


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "RoPE type must be 'default'.*GLM-4-MoE.*'yarn'"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_dropout": 0.1}, "attention_dropout"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "quantization_config"),
        ({"norm_topk_prob": False}, "norm_topk_prob must be True"),
        ({"num_experts_per_tok": 1}, "norm_topk_prob must be False"),
        ({"num_experts_per_tok": 129}, "num_experts_per_tok must be at most num_experts, got 129 and 128"),
        ({"n_group": 3}, "n_group must divide the experts"),
        ({"n_group": 2, "topk_group": 3}, "n_group must divide the experts"),
        ({"n_group": 32, "topk_group": 1}, "n_group must divide the experts"),
        ({"n_group": 8, "topk_group": 2}, "num_experts_per_tok must be twice topk_group, got 8 and 2"),
        ({"n_group": 0}, "n_group must be a whole number above 0"),
        ({"n_shared_experts": 0}, "n_shared_experts must be a whole number above 0"),
        ({"first_k_dense_replace": 46}, "first_k_dense_replace must leave layers with experts, got 46 of 46"),
        ({"partial_rotary_factor": 0.3}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor must be a number above 0 and at most 1, got 1.5"),
        ({"head_dim": 33}, "head_dim, .* must be even and above 0, got 33"),
        ({"routed_scaling_factor": 0.0}, "routed_scaling_factor must be a number above 0"),
        ({"num_key_value_heads": 7}, "num_key_value_heads"),
        ({"n_routed_experts": None}, "n_routed_experts or num_local_experts"),
        ({"intermediate_size": None}, "intermediate_size"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused_by_name(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        FAMILY.check({**AIR, **change})


@pytest.mark.parametrize(
    ("parallel", "change", "said"),
    [
        ({"tensor": 3}, {}, "num_key_value_heads must be a multiple of parallel.tensor, got 8 and 3; choose"),
        ({"tensor": 4}, {"intermediate_size": 10942}, "intermediate_size must be a multiple of parallel.tensor"),
        ({"tensor": 8}, {"moe_intermediate_size": 1404}, "moe_intermediate_size . n_shared_experts must be a multiple"),
        ({"expert": 3}, {}, "num_experts must be a multiple of parallel.expert, got 128 and 3"),
        (
            {"expert_tensor": 3},
            {},
            "moe_intermediate_size must be a multiple of parallel.expert_tensor, got 1408 and 3",
        ),
        ({"pipeline": 47}, {}, "parallel.pipeline must leave no stage empty, got 47 stages for 46 layers"),
    ],
)
def test_layouts_that_do_not_divide_the_model_are_refused(
    parallel: dict[str, int], change: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        FAMILY.check_parallel({**AIR, **change}, ParallelConfig(**parallel))
    FAMILY.check_parallel(AIR, ParallelConfig(tensor=8, expert=16, expert_tensor=2, pipeline=5, context=2))


def test_the_dense_size_binds_only_models_with_dense_layers() -> None:
    all_experts = {**AIR, "first_k_dense_replace": 0, "intermediate_size": 10941}
    FAMILY.check_parallel(all_experts, ParallelConfig(tensor=2))


def test_the_layer_for_multi_token_prediction_is_redundant_and_nothing_else_is() -> None:
    def redundant(name: str, **change: Any) -> bool:
        return FAMILY.is_redundant({**AIR, **change}, name)

    assert redundant("model.layers.46.eh_proj.weight") and redundant("model.layers.46.mlp.experts.3.up_proj.weight")
    assert redundant("model.layers.47.enorm.weight", num_nextn_predict_layers=2)
    for name in (
        "model.layers.45.enorm.weight",
        "model.layers.47.enorm.weight",
        "model.layers.4600.x",
        "lm_head.weight",
    ):
        assert not redundant(name)
    for none in (0, None):
        assert not redundant("model.layers.46.eh_proj.weight", num_nextn_predict_layers=none)
    assert redundant("lm_head.weight", tie_word_embeddings=True)
