"""Everything that can be wrong with a run's inputs, found before any process starts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import zmq

from megatron_rl.checkpoint.folders import EXTRA_NAME, latest_checkpoint, read_extra, reading
from megatron_rl.checkpoint.identity import check_disk_space, check_resumable
from megatron_rl.cli.addresses import listening_address
from megatron_rl.cli.no_effect import check_rl_options, check_sft_options
from megatron_rl.cli.output_folder import check_folder
from megatron_rl.cli.runs import RlRun, SftRun
from megatron_rl.cli.shape import check_rl_shape, check_sft_shape
from megatron_rl.config import ConfigError
from megatron_rl.data.mixture import Mixture
from megatron_rl.data.render import ChatRenderer, load_tokenizer
from megatron_rl.data.rows import open_rows
from megatron_rl.data.samples import SampleRules, check_rows
from megatron_rl.data.stream import data_identity, microbatch_cost, states_to_resume
from megatron_rl.distributed.device import check_platform
from megatron_rl.engine.server import answers
from megatron_rl.model.folder import check_model_folder
from megatron_rl.rollout.env import Environment
from megatron_rl.rollout.environments import check_environment, make_environment
from megatron_rl.trainer.objective import check_resumed_objective
from megatron_rl.trainer.reference_config import check_reference


def check_sft(run: SftRun) -> None:
    """ConfigError or DataError for the first thing that does not fit. Renders data.check_rows rows of each file."""
    check_platform(run.run.platform, num_ranks=run.run.processes)
    check_sft_ranks(run)


def check_sft_ranks(run: SftRun) -> None:
    """check_sft for ranks that may be spread over machines, where each finds its own GPU."""
    check_sft_options(run)
    hf_config = check_model_folder(run.model.path)
    check_sft_shape(run, hf_config)
    microbatch_cost(run.data, hf_config)
    renderer = ChatRenderer(load_tokenizer(run.model.path))
    mixture = Mixture(run.data.train, seed=run.run.seed)
    rules = SampleRules.of(run.data, run.context_length)
    for rows in (*mixture.datasets, *map(open_rows, run.data.heldout)):
        check_rows(rows, renderer, rules, run.data.check_rows)
    check_run_folder(run, hf_config)
    check_resumed_data(run, mixture)


def check_rl_ranks(run: RlRun) -> None:
    """What check_rl finds for the trainer alone, whose engines and orchestrator are started elsewhere."""
    check_rl_options(run)
    hf_config = check_model_folder(run.model.path)
    check_rl_shape(run, hf_config)
    check_reference_policy(run, hf_config)
    load_tokenizer(run.model.path)
    check_run_folder(run, hf_config)


def check_resumed_data(run: SftRun, mixture: Mixture) -> None:
    """ConfigError if the newest checkpoint was trained with another seed, other rows or other settings for them."""
    path = latest_checkpoint(run.run.folder / "checkpoints")
    if path is not None and (path / EXTRA_NAME / "data").is_file():
        with reading(path):
            saved = read_extra(path, "data")
            states_to_resume(saved, data_identity(run.data, mixture, run.context_length))


def check_rl(run: RlRun) -> None:
    """ConfigError for the first thing that does not fit. Makes every environment and its first prompts."""
    check_rl_options(run)
    _check_gpus(run)
    hf_config = check_model_folder(run.model.path)
    check_rl_shape(run, hf_config)
    check_reference_policy(run, hf_config)
    for url in run.engine.urls:
        if not answers(url.rstrip("/")):
            raise ConfigError(
                f"engine.urls must name engines that run already, but {url} does not answer; start it, or set "
                "engine.urls=[] to have engines started here"
            )
    _check_address(run.orchestrator.address)
    check_environments(run, ChatRenderer(load_tokenizer(run.model.path)))
    check_run_folder(run, hf_config)


def check_reference_policy(run: RlRun, hf_config: dict[str, Any]) -> None:
    """ConfigError for a reference that cannot stand in for the model."""
    reference = run.trainer.reference
    if reference is not None:
        check_reference(reference, model_path=Path(run.model.path), hf_config=hf_config, platform=run.run.platform)


def check_run_folder(run: SftRun | RlRun, hf_config: dict[str, Any]) -> None:
    """ConfigError unless the run folder can be written, has room, and holds no checkpoint of something else."""
    check_folder(run.run.folder, "run.dir")
    trainer, dtype = run.trainer, run.model.dtype
    reference = run.trainer.reference if isinstance(run, RlRun) else None
    check_disk_space(
        run.run.folder,
        hf_config,
        dtype,
        config=trainer.checkpoint,
        export=trainer.export,
        references=reference.resets_within(trainer.checkpoint.every_steps) if reference is not None else 0,
    )
    check_resumable(run.run.folder, Path(run.model.path), hf_config, dtype, platform=run.run.platform)
    saved = latest_checkpoint(run.run.folder / "checkpoints")
    if isinstance(run, RlRun) and saved is not None and (saved / EXTRA_NAME / "objective").is_file():
        with reading(saved):
            check_resumed_objective(run.loss, read_extra(saved, "objective"))


def check_environments(run: RlRun, renderer: ChatRenderer | None) -> list[Environment]:
    """The run's environments, each with a first prompt in every split; without a renderer prompts of any length."""
    environments = [make_environment(config) for config in run.environments]
    names = [environment.name for environment in environments]
    if len(set(names)) != len(names):
        raise ConfigError(f"environments must have different names, got {names}; set environments.N.label")
    for environment in environments:
        for prompt in check_environment(environment):
            num_tokens = len(renderer.prompt_ids(prompt.messages, prompt.tools)) if renderer else 0
            if num_tokens >= run.rollout.context_length:
                raise ConfigError(
                    f"rollout.context_length must leave room to answer, got {run.rollout.context_length} for prompt "
                    f"{prompt.prompt_id} with {num_tokens} tokens; raise it"
                )
    return environments


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


def _check_gpus(run: RlRun) -> None:
    """ConfigError where ranks and engines of this machine would have to share GPUs."""
    check_platform(run.run.platform, num_ranks=run.run.processes)
    engines = 0 if run.engine.urls else run.engine.count
    if run.run.platform == "cuda" and run.run.processes + engines > torch.cuda.device_count():
        raise ConfigError(
            f"run.processes + engine.count must be at most the GPUs of this machine, got {run.run.processes} + "
            f"{engines} for {torch.cuda.device_count()}; lower one, or name engines of other machines in engine.urls"
        )


def _check_address(address: str) -> None:
    """ConfigError if the orchestrator could not listen there."""
    if not address:
        return
    with zmq.Context() as context, context.socket(zmq.REP) as probe:
        try:
            probe.bind(listening_address(address))
        except zmq.ZMQError as error:
            raise ConfigError(
                f"orchestrator.address must be free, got {address} ({error.strerror}); "
                "leave orchestrator.address empty for a free loopback port"
            ) from error
