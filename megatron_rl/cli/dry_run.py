"""What a run would be on its cluster: checked and counted from the config, without starting anything.

A machine that has nothing but the config and the model's config.json can do it; what else is there is checked as the
start would, and what is not is named.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megatron_rl.cli.cluster import Cluster, engine_nodes, groups_across_nodes, trainer_nodes
from megatron_rl.cli.dry_run_data import Row, microbatch_row, sft_data
from megatron_rl.cli.dry_run_memory import check_engine_memory, check_memory
from megatron_rl.cli.no_effect import check_rl_options, check_sft_options
from megatron_rl.cli.preflight import check_environments, check_reference_policy, check_run_folder
from megatron_rl.cli.runs import RlRun, RunConfig, SftRun
from megatron_rl.cli.shape import check_rl_shape, check_sft_shape
from megatron_rl.data.render import ChatRenderer, has_tokenizer, load_tokenizer
from megatron_rl.data.stream import microbatch_cost
from megatron_rl.distributed.config import ParallelConfig
from megatron_rl.engine.server import answers
from megatron_rl.model.families import family_for
from megatron_rl.model.folder import check_model_folder, has_weights, read_hf_config


def dry_run_sft(run: SftRun, cluster: Cluster) -> str:
    """The report. ConfigError or DataError for the first thing that does not fit."""
    check_sft_options(run)
    hf_config, renderer, unchecked = _model(run)
    check_sft_shape(run, hf_config)
    nodes = trainer_nodes(run.run, cluster)
    rows = _layout(run.run, run.parallel, cluster, trainer=nodes, engines=0)
    rows += check_memory(run, hf_config, cluster, microbatch_tokens=run.data.microbatch_tokens)
    microbatch_cost(run.data, hf_config)
    rows += sft_data(run, renderer, unchecked)
    _check_run_folder(run, hf_config, unchecked)
    return _shown(rows, unchecked)


def dry_run_rl(run: RlRun, cluster: Cluster) -> str:
    """The report. ConfigError for the first thing that does not fit."""
    check_rl_options(run)
    hf_config, renderer, unchecked = _model(run)
    check_rl_shape(run, hf_config)
    engines = engine_nodes(run, cluster)
    rows = _layout(run.run, run.parallel, cluster, trainer=trainer_nodes(run.run, cluster), engines=engines)
    rows += check_memory(run, hf_config, cluster, microbatch_tokens=run.orchestrator.microbatch_tokens)
    rows += check_engine_memory(run, hf_config, cluster)
    rows += _rl_steps(run, renderer, unchecked)
    unchecked += _reference(run, hf_config)
    unchecked += _silent_engines(run.engine.urls)
    _check_run_folder(run, hf_config, unchecked)
    return _shown(rows, unchecked)


def _model(run: SftRun | RlRun) -> tuple[dict[str, Any], ChatRenderer | None, list[str]]:
    """(config.json, renderer, what of the folder is not on this machine)"""
    folder, unchecked = Path(run.model.path), []
    if run.run.platform == "cuda":
        unchecked.append("GPUs and Transformer Engine of the nodes")
    if has_weights(folder):
        hf_config = check_model_folder(folder)
    else:
        hf_config = read_hf_config(folder)
        family_for(hf_config).check(hf_config)
        unchecked.append(f"weights: none in {folder}")
    if not has_tokenizer(folder):
        unchecked.append(f"tokenizer and chat template: none in {folder}")
        return hf_config, None, unchecked
    return hf_config, ChatRenderer(load_tokenizer(folder)), unchecked


def _layout(run: RunConfig, parallel: ParallelConfig, cluster: Cluster, *, trainer: int, engines: int) -> list[Row]:
    sizes = {**parallel.model_dump(), "data": run.processes // (parallel.model_ranks * parallel.context)}
    layout = ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    rows = [("trainer", f"{_counted(run.processes, 'rank')} on {run.platform}{': ' if layout else ''}{layout}")]
    if run.platform == "cuda":
        across = groups_across_nodes(parallel, run.processes, cluster.gpus_per_node)
        of_engines = f" for the trainer and {engines} for engines" if engines else ""
        rows.append(("nodes", f"{trainer}{of_engines}, of {cluster.gpus_per_node} GPUs"))
        rows.append(("", f"groups across nodes: {', '.join(across) or 'none'}"))
        if "tensor" in across:
            rows.append(("warning", "tensor-parallel groups cross nodes, which is slow; lower parallel.tensor"))
    return rows


def _rl_steps(run: RlRun, renderer: ChatRenderer | None, unchecked: list[str]) -> list[Row]:
    environments = check_environments(run, renderer)
    if renderer is None:
        unchecked.append("lengths of prompts: without a tokenizer")
    groups, size = run.orchestrator.groups_per_step, run.rollout.group_size
    rollouts = groups * size
    copies = run.run.processes // (run.parallel.model_ranks * run.parallel.context)
    engines = len(run.engine.urls) or run.engine.count
    most, capacity = rollouts * run.rollout.context_length, run.orchestrator.microbatch_tokens
    rows = [
        ("step", f"{groups} groups of {size}: {rollouts:,} rollouts, {rollouts / engines:,.0f} per engine"),
        ("", f"at most {most:,} tokens"),
        microbatch_row(capacity, copies),
        ("run", f"{run.trainer.steps:,} steps, {run.trainer.steps * groups:,} prompts without redraws"),
    ]
    for environment in environments:
        size = environment.size(environment.splits[0])
        rows.append(("", f"{environment.name}: {'endless' if size is None else f'{size:,}'} training prompts"))
    if rollouts < copies:
        rows.append(("warning", f"{rollouts} rollouts leave ranks without data: {copies} share a step"))
    return rows


def _reference(run: RlRun, hf_config: dict[str, Any]) -> list[str]:
    """A line about a reference that is not on this machine. ConfigError for one that cannot stand in for the model."""
    path = run.trainer.reference and run.trainer.reference.path
    if path and not has_weights(Path(path)):
        return [f"reference: no weights in {path}"]
    if has_weights(Path(run.model.path)):
        check_reference_policy(run, hf_config)
    return []


def _silent_engines(urls: Sequence[str]) -> list[str]:
    """One line about the engines that do not answer; all are asked at once."""
    with ThreadPoolExecutor(max_workers=max(1, len(urls))) as pool:
        there = list(pool.map(lambda url: answers(url.rstrip("/")), urls))
    silent = [url for url, one in zip(urls, there, strict=True) if not one]
    if not silent:
        return []
    others = f" and {len(silent) - 1} more" if len(silent) > 1 else ""
    return [f"engines: {silent[0]}{others} of {len(urls)} engine.urls do not answer from here"]


def _check_run_folder(run: SftRun | RlRun, hf_config: dict[str, Any], unchecked: list[str]) -> None:
    folder = run.run.folder
    if folder.exists():
        check_run_folder(run, hf_config)
    else:
        unchecked.append(f"run.dir: {folder} is not there yet; the start shows whether it can be written and has room")


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _shown(rows: Sequence[Row], unchecked: Sequence[str]) -> str:
    lines = [f"{heading:<12}{text}".rstrip() for heading, text in rows]
    return "\n".join([*lines, *(f"not checked: {what}" for what in unchecked), "the config fits; nothing was started"])
