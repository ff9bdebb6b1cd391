"""Everything that can be wrong with a run's inputs, found before any process starts."""

import os
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.cli.runs import RlRun, RunConfig, SftRun, data_parallel_size
from megatron_rl.config import ConfigError
from megatron_rl.data.render import ChatRenderer, load_tokenizer
from megatron_rl.data.sft import sft_samples
from megatron_rl.model.folder import check_model_folder
from megatron_rl.rollout.env import Environment
from megatron_rl.rollout.environments import make_environment


def check_sft(run: SftRun) -> None:
    """ConfigError or DataError for the first thing that does not fit. Reads and renders every row."""
    _check_run_folder(run.run)
    _check_context(check_model_folder(run.model.path), run.context_length, "context_length")
    data_parallel_size(run.run, run.parallel)
    renderer = ChatRenderer(load_tokenizer(run.model.path))
    for path in [*run.data.train, *run.data.heldout]:
        sft_samples(Path(path), renderer, context_length=run.context_length)
    if run.run.platform == "cpu" and run.data.microbatch_tokens < run.context_length - 1:
        raise ConfigError(
            f"data.microbatch_tokens must hold the longest sample, got {run.data.microbatch_tokens} "
            f"for context_length {run.context_length}; raise it"
        )


def check_rl(run: RlRun) -> list[Environment]:
    """The run's environments, after ConfigError for the first thing that does not fit."""
    _check_run_folder(run.run)
    _check_context(check_model_folder(run.model.path), run.rollout.context_length, "rollout.context_length")
    data_parallel_size(run.run, run.parallel)
    load_tokenizer(run.model.path)
    environments = [make_environment(config) for config in run.environments]
    names = [environment.name for environment in environments]
    if len(set(names)) != len(names):
        raise ConfigError(f"environments must have different names, got {names}; remove one or merge their weights")
    for environment in environments:
        environment.prompt("train", 0)
    if run.orchestrator.microbatch_tokens < run.rollout.context_length:
        raise ConfigError(
            f"orchestrator.microbatch_tokens must hold the longest rollout, got {run.orchestrator.microbatch_tokens} "
            f"for rollout.context_length {run.rollout.context_length}; raise it"
        )
    if run.rollout.group_size < 2:
        raise ConfigError(f"rollout.group_size must be at least 2 to have a baseline, got {run.rollout.group_size}")
    return environments


def _check_context(hf_config: dict, context_length: int, key: str) -> None:
    limit = hf_config.get("max_position_embeddings")
    if limit is not None and context_length > limit:
        raise ConfigError(f"{key} must not exceed the model's {limit} positions, got {context_length}; lower it")


def _check_run_folder(run: RunConfig) -> None:
    folder = run.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run.dir must be a folder that can be made, got {folder} ({error.strerror})") from error
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"run.dir must be writable, got {folder}; choose another or change its permissions")


def changed_keys(old: dict, new: dict, prefix: str = "") -> Sequence[str]:
    """Dotted keys whose values differ between two config trees."""
    changed = []
    for key in sorted(old.keys() | new.keys()):
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            changed += changed_keys(before, after, f"{prefix}{key}.")
        elif before != after:
            changed.append(f"{prefix}{key}")
    return changed
