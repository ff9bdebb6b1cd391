"""What a run would be on its cluster: checked and counted from the config, without starting anything.

A machine that has nothing but the config and the model's config.json can do it; what else is there is checked as the
start would, and what is not is named.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.cli.cluster import Cluster, engine_nodes, groups_across_nodes, trainer_nodes
from megatron_rl.cli.dry_run_memory import check_engine_memory, check_memory
from megatron_rl.cli.no_effect import check_rl_options, check_sft_options
from megatron_rl.cli.preflight import check_environments, check_reference_policy, check_run_folder, read_samples
from megatron_rl.cli.runs import RlRun, RunConfig, SftRun
from megatron_rl.cli.shape import check_rl_shape, check_sft_shape
from megatron_rl.data.render import ChatRenderer, has_tokenizer, load_tokenizer
from megatron_rl.data.sft import load_conversations
from megatron_rl.distributed.config import ParallelConfig
from megatron_rl.engine.server import answers
from megatron_rl.model.families import family_for
from megatron_rl.model.folder import check_model_folder, has_weights, read_hf_config

Row = tuple[str, str]
"""A heading, empty in further lines of one, and a line of text."""


@dataclass(frozen=True)
class _Rows:
    """Conversations of data files; the lengths are unknown without a tokenizer."""

    count: int
    num_tokens: int | None = None
    longest: int | None = None

    def shown(self) -> str:
        tokens = f", {self.num_tokens:,} tokens, the longest has {self.longest:,}" if self.num_tokens else ""
        return f"{self.count:,} conversations{tokens}"


def dry_run_sft(run: SftRun, cluster: Cluster) -> str:
    """The report. ConfigError or DataError for the first thing that does not fit."""
    check_sft_options(run)
    hf_config, renderer, unchecked = _model(run)
    check_sft_shape(run, hf_config)
    nodes = trainer_nodes(run.run, cluster)
    rows = _layout(run.run, run.parallel, cluster, trainer=nodes, engines=0)
    rows += check_memory(run, hf_config, cluster, microbatch_tokens=run.data.microbatch_tokens)
    rows += _sft_data(run, renderer, unchecked)
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


def _sft_data(run: SftRun, renderer: ChatRenderer | None, unchecked: list[str]) -> list[Row]:
    copies = run.run.processes // (run.parallel.model_ranks * run.parallel.context)
    per_step = run.data.samples_per_step
    train = _rows(run, run.data.train, renderer, unchecked)
    held_out = _rows(run, run.data.heldout, renderer, unchecked) if run.data.heldout else None
    step = f"{per_step} conversations, at most {per_step * run.context_length:,} tokens"
    rows = []
    if train is not None:
        rows.append(("data", train.shown()))
        step += f", {per_step * train.num_tokens / train.count:,.0f} on average" if train.num_tokens else ""
    rows.append(("step", step))
    if train is not None:
        epoch, steps = train.count / per_step, run.trainer.steps
        rows.append(("", f"{epoch:,.1f} steps per epoch; {steps:,} steps are {steps / epoch:.2f} epochs"))
    if held_out is not None:
        rows.append(("held out", held_out.shown()))
    rows.append(("microbatch", _microbatch(run.data.microbatch_tokens, copies)))
    if per_step < copies:
        rows.append(("warning", f"data.samples_per_step={per_step} leaves ranks without data: {copies} share a step"))
    return rows


def _rows(run: SftRun, paths: Sequence[str], renderer: ChatRenderer | None, unchecked: list[str]) -> _Rows | None:
    """What the files hold; None where one is not on this machine. DataError for a row that does not fit."""
    there = [path for path in paths if Path(path).exists()]
    unchecked += [f"data: no {path} here" for path in paths if path not in there]
    if renderer is None:
        unchecked += [f"data: length and rendering of the rows of {path}, without a tokenizer" for path in there]
        count = sum(1 for path in there for _ in load_conversations(Path(path)))
        return _Rows(count) if len(there) == len(paths) else None
    lengths = [len(sample.token_ids) for path in there for sample in read_samples(run, path, renderer)]
    return _Rows(len(lengths), sum(lengths), max(lengths)) if len(there) == len(paths) else None


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
        ("microbatch", _microbatch(capacity, copies)),
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


def _microbatch(capacity: int, copies: int) -> str:
    return f"at most {capacity:,} tokens" + (f"; {copies} data-parallel ranks share a step" if copies > 1 else "")


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _shown(rows: Sequence[Row], unchecked: Sequence[str]) -> str:
    lines = [f"{heading:<12}{text}".rstrip() for heading, text in rows]
    return "\n".join([*lines, *(f"not checked: {what}" for what in unchecked), "the config fits; nothing was started"])
