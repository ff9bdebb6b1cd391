"""Whether a run's numbers fit its model and its ranks. Needs config.json and nothing else of the machine."""

from pathlib import Path
from typing import Any

from megatron_rl.cli.addresses import check_address_form, engine_place
from megatron_rl.cli.runs import RlRun, SftRun
from megatron_rl.config import ConfigError
from megatron_rl.distributed.config import ParallelConfig, check_world
from megatron_rl.engine.server import check_engine
from megatron_rl.model.families import family_for


def check_sft_shape(run: SftRun, hf_config: dict[str, Any]) -> None:
    """ConfigError for the first number that does not fit."""
    _check_layout(hf_config, run)
    _check_context(hf_config, run.context_length, "context_length")
    _check_tokens(run.data.microbatch_tokens, run.context_length, run.parallel, "data.", "")


def check_rl_shape(run: RlRun, hf_config: dict[str, Any]) -> None:
    """ConfigError for the first number or address that does not fit."""
    context_length = run.rollout.context_length
    _check_layout(hf_config, run)
    _check_context(hf_config, context_length, "rollout.context_length")
    _check_tokens(run.orchestrator.microbatch_tokens, context_length, run.parallel, "orchestrator.", "rollout.")
    check_engine(run.engine, Path(run.model.path))
    longest = run.engine.max_model_len
    if longest is not None and longest < context_length:
        raise ConfigError(
            f"engine.max_model_len must hold rollout.context_length={context_length}, got {longest}; "
            "raise it or leave it null"
        )
    if longest is not None:
        _check_context(hf_config, longest, "engine.max_model_len")
    if run.rollout.group_size < 2:
        raise ConfigError(f"rollout.group_size must be at least 2 to have a baseline, got {run.rollout.group_size}")
    for url in run.engine.urls:
        engine_place(url)
    check_address_form(run.orchestrator.address)


def _check_layout(hf_config: dict[str, Any], run: SftRun | RlRun) -> None:
    if run.run.platform == "cuda" and run.model.dtype == "float32":
        raise ConfigError(
            "platform cuda needs model.dtype=bfloat16, got float32: Transformer Engine's attention takes packed "
            "documents in 16 bits only; set model.dtype=bfloat16 (the optimizer keeps float32 weights)"
        )
    check_world(run.parallel, run.run.processes)
    family_for(hf_config).check_parallel(hf_config, run.parallel)


def _check_context(hf_config: dict[str, Any], context_length: int, key: str) -> None:
    limit = hf_config.get("max_position_embeddings")
    if isinstance(limit, int) and context_length > limit:
        raise ConfigError(f"{key} must not exceed the model's {limit} positions, got {context_length}; lower it")


def _check_tokens(
    microbatch_tokens: int, context_length: int, parallel: ParallelConfig, batch_key: str, context_key: str
) -> None:
    """Whether a microbatch holds the longest sample, and context-parallel ranks have something to share."""
    if parallel.context > 1 and context_length < 2 * parallel.context:
        raise ConfigError(
            f"parallel.context must be at most half of {context_key}context_length={context_length}, so that every "
            f"rank has tokens of the longest sample, got {parallel.context}; lower it"
        )
    multiple = 2 * parallel.context if parallel.context > 1 else 1
    longest = -(-context_length // multiple) * multiple
    if microbatch_tokens < longest:
        padded = f", padded to {longest} for parallel.context={parallel.context}" if longest > context_length else ""
        raise ConfigError(
            f"{batch_key}microbatch_tokens must hold the longest sample, got {microbatch_tokens} for a context of "
            f"{context_length}{padded}; raise it"
        )
