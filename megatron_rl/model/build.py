"""Hugging Face folder to a PolicyModel, ready for Megatron's DistributedDataParallel."""

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rl.config import ConfigError
from megatron_rl.distributed.config import ParallelConfig
from megatron_rl.distributed.device import Platform
from megatron_rl.distributed.groups import ParallelGroups
from megatron_rl.model.config import ModelConfig
from megatron_rl.model.families import family_for
from megatron_rl.model.families.family import HfConfig
from megatron_rl.model.folder import check_model_folder
from megatron_rl.model.layer import cpu_block_spec
from megatron_rl.model.policy import PolicyModel

__all__ = ["ModelConfig", "build_from_config", "build_model"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def build_model(
    model_config: ModelConfig, parallel: ParallelConfig, groups: ParallelGroups, platform: Platform
) -> PolicyModel:
    """This rank's shard of the model, every parameter NaN until weights are loaded (checkpoint.convert.load_hf).

    Parameters have model_config.dtype and live on platform.device; gradients are summed over data-parallel ranks,
    not averaged (calculate_per_token_loss). ConfigError for a folder, an architecture or sizes that do not fit.
    """
    return build_from_config(check_model_folder(model_config.path), model_config.dtype, parallel, groups, platform)


def build_from_config(
    hf_config: HfConfig, dtype_name: str, parallel: ParallelConfig, groups: ParallelGroups, platform: Platform
) -> PolicyModel:
    """build_model for a config.json that was read already; dtype_name is torch's, such as bfloat16."""
    family = family_for(hf_config)
    family.check_parallel(hf_config, parallel)
    if dtype_name not in DTYPES:
        raise ConfigError(f"a model's dtype must be one of {sorted(DTYPES)}, got {dtype_name!r}; set model.dtype")
    dtype = DTYPES[dtype_name]
    config = TransformerConfig(
        **family.transformer_kwargs(hf_config), **_platform_kwargs(platform), **_shared_kwargs(parallel, dtype)
    )
    model = PolicyModel(
        config,
        _layer_spec(config, platform),  # type: ignore[arg-type]
        position_embedding_type="none" if platform.kind == "cpu" else "rope",
        parallel_output=True,
        pg_collection=groups.pg,
        **family.model_kwargs(hf_config),
    )
    model.hf_config, model.family, model.weight_parts = hf_config, family, family.weight_parts(hf_config)
    _mark_parameters(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    return model.to(platform.device)


def _mark_parameters(model: PolicyModel) -> None:
    """Tells Megatron's gradient norm and reductions which parameters are shards and which are experts.

    Megatron marks shards while it initialises them, which is skipped here; unmarked, the norm would count only those
    of rank 0. Experts' gradients are summed over the expert data-parallel group. Megatron does so only for expert
    parallelism above 1; with experts whole on every tensor-parallel rank the groups differ at 1 as well, and one
    layout for all keeps optimizer checkpoints alike.
    """
    parameters = dict(model.named_parameters())
    for part in model.weight_parts:
        if part.split != "whole":
            name = next(name for name in part.params if name in parameters)
            parameters[name].tensor_model_parallel = True  # type: ignore[attr-defined]
            parameters[name].partition_dim = 0 if part.split == "rows" else 1  # type: ignore[attr-defined]
    for name, parameter in parameters.items():
        if ".experts." in name:
            parameter.allreduce = False  # type: ignore[attr-defined]
            parameter.tensor_model_parallel = True  # type: ignore[attr-defined]


def _shared_kwargs(parallel: ParallelConfig, dtype: torch.dtype) -> dict:
    return dict(
        tensor_model_parallel_size=parallel.tensor,
        sequence_parallel=parallel.tensor > 1,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=1,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        perform_initialization=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
        moe_router_dtype="fp32",
        moe_token_dispatcher_type="alltoall",
        calculate_per_token_loss=True,
        cuda_graph_scope=[],
    )


def _platform_kwargs(platform: Platform) -> dict:
    """Fused kernels need Transformer Engine or Apex; the bias fusions compile for seconds on a CPU."""
    on_gpu = platform.kind == "cuda"
    return dict(
        use_cpu_initialization=not on_gpu,
        moe_grouped_gemm=on_gpu,
        moe_permute_fusion=on_gpu,
        moe_router_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=on_gpu,
        bias_activation_fusion=on_gpu,
        bias_dropout_fusion=on_gpu,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
    )


def _layer_spec(config: TransformerConfig, platform: Platform) -> ModuleSpec | TransformerBlockSubmodules:
    if platform.kind == "cpu":
        return cpu_block_spec(config)
    return get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts, moe_grouped_gemm=True, qk_layernorm=config.qk_layernorm
    )
