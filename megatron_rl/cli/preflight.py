"""Everything that can be wrong with a run's inputs, found before any process starts."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import zmq

from megatron_rl.cli.no_effect import check_rl_options, check_sft_options
from megatron_rl.cli.output_folder import check_folder
from megatron_rl.cli.runs import RlRun, RunConfig, SftRun
from megatron_rl.config import ConfigError
from megatron_rl.data.render import ChatRenderer, load_tokenizer
from megatron_rl.data.sft import sft_samples
from megatron_rl.distributed.config import ParallelConfig
from megatron_rl.distributed.device import check_platform
from megatron_rl.engine.server import answers, check_engine
from megatron_rl.model.families import family_for
from megatron_rl.model.folder import check_model_folder
from megatron_rl.rollout.environments import check_environment, make_environment


def check_sft(run: SftRun) -> None:
    """ConfigError or DataError for the first thing that does not fit. Reads and renders every row."""
    check_sft_options(run)
    check_platform(run.run.platform, num_ranks=run.run.processes)
    hf_config = check_model_folder(run.model.path)
    _check_layout(hf_config, run.run, run.parallel)
    _check_context(hf_config, run.context_length, "context_length")
    _check_capacity(run.data.microbatch_tokens, run.context_length, "data.microbatch_tokens")
    renderer = ChatRenderer(load_tokenizer(run.model.path))
    for path in [*run.data.train, *run.data.heldout]:
        sft_samples(Path(path), renderer, context_length=run.context_length)
    check_folder(run.run.folder, "run.dir")


def check_rl(run: RlRun) -> None:
    """ConfigError for the first thing that does not fit. Makes every environment and its first prompts."""
    check_rl_options(run)
    check_platform(run.run.platform, num_ranks=run.run.processes)
    hf_config = check_model_folder(run.model.path)
    _check_layout(hf_config, run.run, run.parallel)
    _check_context(hf_config, run.rollout.context_length, "rollout.context_length")
    _check_capacity(run.orchestrator.microbatch_tokens, run.rollout.context_length, "orchestrator.microbatch_tokens")
    _check_engine(run, hf_config)
    _check_address(run.orchestrator.address)
    renderer = ChatRenderer(load_tokenizer(run.model.path))
    environments = [make_environment(config) for config in run.environments]
    names = [environment.name for environment in environments]
    if len(set(names)) != len(names):
        raise ConfigError(f"environments must have different names, got {names}; set environments.N.label")
    for environment in environments:
        for prompt in check_environment(environment):
            num_tokens = len(renderer.prompt_ids(prompt.messages, prompt.tools))
            if num_tokens >= run.rollout.context_length:
                raise ConfigError(
                    f"rollout.context_length must leave room to answer, got {run.rollout.context_length} for prompt "
                    f"{prompt.prompt_id} with {num_tokens} tokens; raise it"
                )
    if run.rollout.group_size < 2:
        raise ConfigError(f"rollout.group_size must be at least 2 to have a baseline, got {run.rollout.group_size}")
    check_folder(run.run.folder, "run.dir")


def changed_keys(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> Sequence[str]:
    """Dotted keys whose values differ between two config trees."""
    changed = []
    for key in sorted(old.keys() | new.keys()):
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            changed += changed_keys(before, after, f"{prefix}{key}.")
        elif before != after:
            changed.append(f"{prefix}{key}")
    return changed


def _check_layout(hf_config: dict[str, Any], run: RunConfig, parallel: ParallelConfig) -> None:
    for key, size in (("parallel.tensor", parallel.tensor), ("parallel.expert", parallel.expert)):
        if run.processes % size:
            raise ConfigError(
                f"{key} must divide run.processes, got {size} and {run.processes}; start a multiple of it"
            )
    family_for(hf_config).check_parallel(hf_config, parallel)


def _check_context(hf_config: dict[str, Any], context_length: int, key: str) -> None:
    limit = hf_config.get("max_position_embeddings")
    if isinstance(limit, int) and context_length > limit:
        raise ConfigError(f"{key} must not exceed the model's {limit} positions, got {context_length}; lower it")


def _check_capacity(microbatch_tokens: int, context_length: int, key: str) -> None:
    if microbatch_tokens < context_length:
        raise ConfigError(
            f"{key} must hold the longest sample, got {microbatch_tokens} for a context of {context_length}; raise it"
        )


def _check_engine(run: RlRun, hf_config: dict[str, Any]) -> None:
    engine = run.engine
    check_engine(engine, Path(run.model.path))
    if engine.max_model_len is not None and engine.max_model_len < run.rollout.context_length:
        raise ConfigError(
            f"engine.max_model_len must hold rollout.context_length={run.rollout.context_length}, "
            f"got {engine.max_model_len}; raise it or leave it null"
        )
    if engine.max_model_len is not None:
        _check_context(hf_config, engine.max_model_len, "engine.max_model_len")
    for url in engine.urls:
        if not re.fullmatch(r"https?://[^/\s]+/?", url):
            raise ConfigError(f"engine.urls must read http://HOST:PORT, got {url!r}; mend it")
        if not answers(url.rstrip("/")):
            raise ConfigError(
                f"engine.urls must name engines that run already, but {url} does not answer; start it, or set "
                "engine.urls=[] to have engines started here"
            )


def _check_address(address: str) -> None:
    """ConfigError if the orchestrator could not listen there."""
    if not address:
        return
    cure = "leave orchestrator.address empty for a free loopback port"
    port = re.fullmatch(r"tcp://.+:(\d+)", address)
    if not (address.startswith("ipc://") or (port and 0 < int(port[1]) < 65536)):
        raise ConfigError(f"orchestrator.address must read tcp://HOST:PORT, got {address!r}; {cure}")
    with zmq.Context() as context, context.socket(zmq.REP) as probe:
        try:
            probe.bind(address)
        except zmq.ZMQError as error:
            raise ConfigError(f"orchestrator.address must be free, got {address} ({error.strerror}); {cure}") from error
