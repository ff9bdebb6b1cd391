"""What one rank will hold in memory, from sizes alone and before anything is started. Imports no Megatron.

Parameters, gradients and optimizer state are counted from the family's weight parts: exact but for the padding of
Megatron's buffers (below a percent beyond toy sizes). Activations and the head follow a formula; what is not counted at
all (a CUDA context, NCCL's buffers, fragmentation of the allocator) takes a few GiB of a GPU.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

from megatron_rl_kernels.linear_logprob import default_chunk

from megatron_rl.distributed.config import ParallelConfig
from megatron_rl.model.config import ModelConfig
from megatron_rl.model.families import WeightPart, family_for
from megatron_rl.model.stages import stage_layers, stage_of

_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class RankMemory:
    """Bytes on the fullest rank of one pipeline stage."""

    stage: int
    parameters: int
    """In the model's dtype; buffers that are carried along but not trained too."""
    gradients: int
    """float32, whatever the model's dtype."""
    optimizer: int
    """Two float32 moments and, for bfloat16, float32 master weights; shared by the ranks that hold equal weights."""
    activations: int
    """Kept for the backward passes of the microbatches in flight, and what one layer needs while it is recomputed."""
    head: int
    """Logits of one chunk of tokens, and float32 copies and gradients around them. Last stage only."""

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.head


@dataclass
class _Weights:
    """Elements on one rank."""

    dense: int = 0
    expert: int = 0
    buffer_bytes: int = 0


def stage_memory(
    hf_config: dict[str, Any],
    model: ModelConfig,
    parallel: ParallelConfig,
    *,
    world_size: int,
    microbatch_tokens: int,
    platform: Literal["cpu", "cuda"],
) -> list[RankMemory]:
    """An estimate for every pipeline stage. ConfigError when a stage would stay empty.

    The layout must divide the model and the world (Family.check_parallel, check_world). Activations assume that
    experts get equal shares of the tokens.
    """
    family = family_for(hf_config)
    sizes, parts = family.transformer_kwargs(hf_config), family.weight_parts(hf_config)
    layers = stage_layers(sizes["num_layers"], parallel.pipeline)
    moe_layers = {part.layer for part in parts if part.expert is not None}
    # The optimizer state of dense weights is spread over data- and context-parallel ranks, of an expert over those that
    # hold it.
    dense_copies = world_size // (parallel.tensor * parallel.pipeline)
    expert_copies = world_size // (parallel.expert * parallel.expert_tensor * parallel.pipeline)
    state_bytes = 8 + (4 if model.dtype == "bfloat16" else 0)
    vocabulary = family.model_kwargs(hf_config)["vocab_size"] // parallel.tensor
    stages = []
    for stage, weights in enumerate(_weights(parts, sizes["num_layers"], parallel)):
        elements = weights.dense + weights.expert
        stages.append(
            RankMemory(
                stage=stage,
                parameters=elements * _BYTES[model.dtype] + weights.buffer_bytes,
                gradients=elements * 4,
                optimizer=math.ceil(state_bytes * (weights.dense / dense_copies + weights.expert / expert_copies)),
                activations=_activations(
                    sizes,
                    model,
                    num_moe=sum(layer in moe_layers for layer in layers[stage]),
                    num_dense=sum(layer not in moe_layers for layer in layers[stage]),
                    tokens=math.ceil(microbatch_tokens / (parallel.tensor * parallel.context)),
                    in_flight=parallel.pipeline - stage,
                ),
                head=_head(
                    vocabulary,
                    sizes["hidden_size"],
                    tokens=math.ceil(microbatch_tokens / parallel.context),
                    platform=platform,
                )
                if stage == parallel.pipeline - 1
                else 0,
            )
        )
    return stages


def _weights(parts: list[WeightPart], num_layers: int, parallel: ParallelConfig) -> list[_Weights]:
    """Of one rank of every stage."""
    stages = [_Weights() for _ in range(parallel.pipeline)]
    experts = [0.0] * parallel.pipeline
    for part in parts:
        stage = stage_of(part, num_layers, parallel.pipeline)
        elements = math.prod(part.shape)
        if part.expert is not None:
            experts[stage] += elements / parallel.expert / _ways(part, parallel.expert_tensor)
        elif part.dtype is not None:
            stages[stage].buffer_bytes += elements * _BYTES[part.dtype]
        else:
            stages[stage].dense += elements // _ways(part, parallel.tensor)
            if part.copy_on_last is not None and parallel.pipeline > 1:
                stages[-1].dense += elements // _ways(part, parallel.tensor)
    for weights, elements in zip(stages, experts, strict=True):
        weights.expert = round(elements)
    return stages


def _ways(part: WeightPart, ranks: int) -> int:
    return 1 if part.split == "whole" else ranks


def _activations(
    sizes: dict[str, Any], model: ModelConfig, *, num_moe: int, num_dense: int, tokens: int, in_flight: int
) -> int:
    """Of one stage under 1F1B, where stage s of p keeps at most p - s microbatches for their backward passes.

    Elements per token of the rank's share (T / tensor / context: sequence and head parallelism cut everything alike),
    with H hidden, q and kv the widths of query and key, K experts per token of inner width I, S of the shared expert:
        attention   2 H for residual and norm, 2 (q + 2 kv) before and after norm and RoPE, q of the core's output
        MoE layer   2 H, K (2 H + 3 I) of the dispatched tokens, 3 S; and of the router 9 bytes per expert and, in
                    bfloat16, its input in float32
        dense layer 2 H, 3 F
    recompute selective keeps 2 H of an MoE layer's second half, full keeps H of a whole layer; either holds one layer's
    elements while it is computed again.
    """
    hidden, width = sizes["hidden_size"], sizes["kv_channels"]
    queries, keys = sizes["num_attention_heads"] * width, sizes["num_query_groups"] * width
    shared = sizes.get("moe_shared_expert_intermediate_size") or 0
    dtype_bytes = _BYTES[model.dtype]
    attention = dtype_bytes * (2 * hidden + 2 * (queries + 2 * keys) + queries)
    dispatched = sizes["moe_router_topk"] * (2 * hidden + 3 * sizes["moe_ffn_hidden_size"]) + 3 * shared
    router = 9 * sizes["num_moe_experts"] + (4 * hidden if dtype_bytes < 4 else 0)
    moe = attention + dtype_bytes * (2 * hidden + dispatched) + router
    dense = attention + dtype_bytes * (2 * hidden + 3 * sizes["ffn_hidden_size"])
    kept_moe, kept_dense, again = {
        "none": (moe, dense, 0),
        "selective": (attention + dtype_bytes * 2 * hidden, dense, moe),
        "full": (dtype_bytes * hidden, dtype_bytes * hidden, moe if num_moe else dense),
    }[model.recompute]
    return tokens * (in_flight * (num_moe * kept_moe + num_dense * kept_dense) + again)


def _head(vocabulary: int, hidden: int, *, tokens: int, platform: Literal["cpu", "cuda"]) -> int:
    """vocabulary: rows of this rank. The head works in float32, chunk by chunk; its gradients are whole."""
    rows = min(default_chunk(vocabulary, platform), tokens)
    return 4 * (rows * vocabulary + 2 * vocabulary * hidden + 2 * tokens * hidden)
