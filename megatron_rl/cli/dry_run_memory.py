"""The estimates of memory that a dry run shows and compares with a GPU."""

import math
from typing import Any

from megatron_rl.cli.cluster import Cluster
from megatron_rl.cli.runs import RlRun, SftRun
from megatron_rl.config import ConfigError
from megatron_rl.model.families import family_for
from megatron_rl.model.memory import RankMemory, stage_memory

_GIB = 2**30
_ALLOWANCE_GIB = 4.0
"""For a CUDA context, NCCL's buffers and fragmentation: a round figure, not derived."""
_ALLOWED = "CUDA, NCCL, fragmentation: allowed"
_ENGINE_ALLOWANCE_GIB = 3.0
"""What vLLM keeps beside weights and cache for activations and CUDA graphs: a round figure too."""

Row = tuple[str, str]


def check_memory(
    run: SftRun | RlRun, hf_config: dict[str, Any], cluster: Cluster, *, microbatch_tokens: int
) -> list[Row]:
    """Rows of the fullest stage's parts. ConfigError if it does not fit a GPU of the cluster."""
    if cluster.gpu_memory_gib is not None and run.run.platform == "cpu":
        raise ConfigError("--gpu-memory has no effect with run.platform cpu; remove it")
    stages = stage_memory(
        hf_config,
        run.model,
        run.parallel,
        world_size=run.run.processes,
        microbatch_tokens=microbatch_tokens,
        platform=run.run.platform,
    )
    worst = max(stages, key=lambda memory: sum(_parts(memory, run).values()))
    allowance = _ALLOWANCE_GIB if run.run.platform == "cuda" else 0.0
    total = sum(_parts(worst, run).values()) + allowance
    where = f", pipeline stage {worst.stage + 1} of {len(stages)}" if len(stages) > 1 else ""
    shown = _parts(worst, run) | ({_ALLOWED: allowance} if allowance else {}) | {"total": total}
    unit, scale = ("GiB", 1) if total >= 1 else ("MiB", 1024)
    rows = [("memory", f"{unit} per rank{where}, an estimate")]
    rows += [("", f"  {name:<34}{size * scale:>8.2f}") for name, size in shown.items()]
    if cluster.gpu_memory_gib is not None and total > cluster.gpu_memory_gib:
        parts = ", ".join(f"{name} {size:.1f}" for name, size in _parts(worst, run).items())
        raise ConfigError(
            f"a rank must fit the {cluster.gpu_memory_gib:g} GiB of its GPU (--gpu-memory), got an estimate of "
            f"{total:.1f} GiB{where} ({parts}, {_ALLOWED} {allowance:g}); {_cures(run, microbatch_tokens)}"
        )
    return rows


def _parts(memory: RankMemory, run: SftRun | RlRun) -> dict[str, float]:
    master = " and master weights" if run.model.dtype == "bfloat16" else ""
    parts = {
        f"parameters ({run.model.dtype})": memory.parameters,
        "gradients (float32)": memory.gradients,
        f"AdamW moments{master}": memory.optimizer,
        f"activations (recompute {run.model.recompute})": memory.activations,
        "head": memory.head,
        **dict.fromkeys(_frozen_copies(run), memory.parameters),
        "reference policy while it scores": _visit(run, memory),
    }
    return {name: size / _GIB for name, size in parts.items() if size}


def _frozen_copies(run: SftRun | RlRun) -> list[str]:
    """What else always holds this rank's parameters on its device."""
    if isinstance(run, SftRun):
        return []
    copies = ["reference policy"] if run.trainer.reference and not run.trainer.reference.offload else []
    return [*copies, "proximal policy"] if run.loss.proximal else copies


def _visit(run: SftRun | RlRun, memory: RankMemory) -> int:
    """What an offloaded reference adds to the peak: its copy comes where a step's activations and head are not yet."""
    if isinstance(run, SftRun) or run.trainer.reference is None or not run.trainer.reference.offload:
        return 0
    return max(0, memory.parameters - memory.activations - memory.head)


def _cures(run: SftRun | RlRun, microbatch_tokens: int) -> str:
    cures = ["more ranks (run.processes, parallel.tensor, parallel.pipeline, parallel.expert)"]
    if run.model.dtype != "bfloat16":
        cures.append("model.dtype=bfloat16")
    if run.model.recompute != "full":
        cures.append("model.recompute=full")
    return f"use {', '.join(cures)} or fewer microbatch_tokens than {microbatch_tokens:,}"


def check_engine_memory(run: RlRun, hf_config: dict[str, Any], cluster: Cluster) -> list[Row]:
    """Rows about one engine on one GPU. ConfigError if weights and one longest rollout do not fit its share."""
    family = family_for(hf_config)
    sizes = family.transformer_kwargs(hf_config)
    dtype = run.engine.dtype if run.engine.dtype != "auto" else hf_config.get("dtype") or hf_config.get("torch_dtype")
    dtype_bytes = 4 if dtype == "float32" else 2
    weights = sum(math.prod(part.shape) for part in family.weight_parts(hf_config)) * dtype_bytes
    per_token = 2 * sizes["num_layers"] * sizes["num_query_groups"] * sizes["kv_channels"] * dtype_bytes
    engines = len(run.engine.urls) or run.engine.count
    text = f"{engines} of {weights / _GIB:.3g} GiB weights, {per_token / 1024:.0f} KiB per token of keys and values"
    rows = [("engines", text)]
    if run.run.platform == "cpu":
        room, what = run.engine.kv_cache_gib * _GIB, "engine.kv_cache_gib"
    elif cluster.gpu_memory_gib is not None:
        share = cluster.gpu_memory_gib * run.engine.gpu_memory_share
        room, what = (share - _ENGINE_ALLOWANCE_GIB) * _GIB - weights, "engine.gpu_memory_share of --gpu-memory"
    else:
        return rows
    if room < per_token * run.rollout.context_length:
        raise ConfigError(
            f"{what} must leave room for one rollout of rollout.context_length={run.rollout.context_length} "
            f"({per_token * run.rollout.context_length / _GIB:.2f} GiB), got {room / _GIB:.2f} GiB beside the weights; "
            "raise it or shorten the context"
        )
    at_once = room / per_token / run.rollout.context_length
    rows.append(("", f"room for {room / per_token:,.0f} tokens, {at_once:.0f} rollouts of full length at once"))
    return rows
