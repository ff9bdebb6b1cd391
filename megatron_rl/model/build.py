"""Hugging Face folder to a PolicyModel, ready for Megatron's DistributedDataParallel."""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rl.config import ConfigError
from megatron_rl.distributed.config import ParallelConfig
from megatron_rl.distributed.device import Platform
from megatron_rl.distributed.groups import ParallelGroups
from megatron_rl.model.config import ModelConfig, Recompute
from megatron_rl.model.families import family_for
from megatron_rl.model.families.family import HfConfig
from megatron_rl.model.folder import check_model_folder
from megatron_rl.model.layer import cpu_block_spec
from megatron_rl.model.policy import PolicyModel
from megatron_rl.model.router import freeze_expert_bias
from megatron_rl.model.stages import stage_layers

__all__ = ["ModelConfig", "build_from_config", "build_model"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def build_model(
    model_config: ModelConfig, parallel: ParallelConfig, groups: ParallelGroups, platform: Platform
) -> PolicyModel:
    """This rank's part of the model, every parameter NaN until weights are loaded (checkpoint.convert.load_hf).

    Parameters have model_config.dtype and live on platform.device; gradients are summed over data-parallel ranks,
    not averaged (calculate_per_token_loss). ConfigError for a folder, an architecture or sizes that do not fit.
    """
    hf_config = check_model_folder(model_config.path)
    return build_from_config(
        hf_config, model_config.dtype, parallel, groups, platform, recompute=model_config.recompute
    )


def build_from_config(
    hf_config: HfConfig,
    dtype_name: str,
    parallel: ParallelConfig,
    groups: ParallelGroups,
    platform: Platform,
    *,
    recompute: Recompute = "none",
) -> PolicyModel:
    """build_model for a config.json that was read already; dtype_name is torch's, such as bfloat16."""
    family = family_for(hf_config)
    family.check_parallel(hf_config, parallel)
    if dtype_name not in DTYPES:
        raise ConfigError(
            f"a model's dtype must be one of {sorted(DTYPES)}, got {dtype_name!r}; set model.dtype of a run, or the "
            "dtype in config.json of what is converted, to one of them: weights are cast to it"
        )
    dtype = DTYPES[dtype_name]
    family_kwargs = family.transformer_kwargs(hf_config)
    stages = stage_layers(family_kwargs["num_layers"], groups.pp_size)
    config = TransformerConfig(
        **family_kwargs,
        **_platform_kwargs(platform),
        **_shared_kwargs(parallel, dtype),
        **_pipeline_kwargs(stages, platform),
        **_recompute_kwargs(recompute, platform),
    )
    layers = stages[groups.pp_rank]
    model = PolicyModel(
        config,
        _layer_spec(config, platform, layers, groups),  # type: ignore[arg-type]
        position_embedding_type="none" if platform.kind == "cpu" else "rope",
        pre_process=groups.is_first_stage,
        post_process=groups.is_last_stage,
        parallel_output=True,
        pg_collection=groups.pg,
        **family.model_kwargs(hf_config),
    )
    model.hf_config, model.family, model.weight_parts = hf_config, family, family.weight_parts(hf_config)
    model.layers = layers
    _mark_parameters(model)
    freeze_expert_bias(model, config)
    with torch.no_grad():
        for tensor in model.global_tensors().values():
            tensor.fill_(float("nan"))
    return model.to(platform.device)


def _mark_parameters(model: PolicyModel) -> None:
    """Tells Megatron's gradient norm and reductions which parameters are shards and which are experts.

    Megatron marks shards while it initialises them, which is skipped here; unmarked, the norm would count only those
    of rank 0. Experts' gradients are summed over the expert data-parallel group. Megatron does so only for expert
    parallelism above 1; with experts whole on every tensor-parallel rank the groups differ at 1 as well, and one
    layout for all keeps optimizer checkpoints alike.
    """
    tensors = model.global_tensors()
    for part in model.weight_parts:
        if part.split == "whole" or part.expert is not None:
            continue
        for name in (*part.params, part.copy_on_last):
            if name in tensors:
                tensors[name].tensor_model_parallel = True  # type: ignore[attr-defined]
                tensors[name].partition_dim = 0 if part.split == "rows" else 1  # type: ignore[attr-defined]
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            parameter.allreduce = False  # type: ignore[attr-defined]
            parameter.tensor_model_parallel = True  # type: ignore[attr-defined]


def _shared_kwargs(parallel: ParallelConfig, dtype: torch.dtype) -> dict:
    return dict(
        tensor_model_parallel_size=parallel.tensor,
        sequence_parallel=parallel.tensor > 1,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=parallel.expert_tensor,
        context_parallel_size=parallel.context,
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


def _recompute_kwargs(recompute: Recompute, platform: Platform) -> dict[str, Any]:
    """Transformer Engine's attention keeps no scores, so only the CPU's is worth computing again."""
    if recompute == "none":
        return {}
    if recompute == "full":
        return dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    modules = ["core_attn", "moe"] if platform.kind == "cpu" else ["moe"]
    return dict(recompute_granularity="selective", recompute_modules=modules)


def _pipeline_kwargs(stages: Sequence[range], platform: Platform) -> dict[str, Any]:
    """Packed batches differ in length, so every stage first tells the next one the shape of what it sends."""
    if len(stages) == 1:
        return {}
    layout = [["decoder"] * len(layers) for layers in stages]
    layout[0].insert(0, "embedding")
    layout[-1].append("loss")
    return dict(
        pipeline_model_parallel_size=len(stages),
        pipeline_model_parallel_layout=layout,
        variable_seq_lengths=True,
        batch_p2p_sync=platform.kind == "cuda",
    )


def _platform_kwargs(platform: Platform) -> dict:
    """Fused kernels need Transformer Engine or Apex; the bias fusions compile for seconds on a CPU."""
    on_gpu = platform.kind == "cuda"
    return dict(
        use_cpu_initialization=not on_gpu,
        init_model_with_meta_device=platform.device.type == "meta",
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


def _layer_spec(
    config: TransformerConfig, platform: Platform, layers: range, groups: ParallelGroups
) -> TransformerBlockSubmodules:
    if platform.kind == "cpu":
        return cpu_block_spec(config, layers)
    return get_gpt_decoder_block_spec(
        config, use_transformer_engine=True, normalization=config.normalization, pp_rank=groups.pp_rank
    )
