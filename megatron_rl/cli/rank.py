"""Entering and leaving the world of ranks."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megatron_rl.cli.runs import CONFIG_FILE, RunConfig
from megatron_rl.config import ConfigError, ConfigModel
from megatron_rl.config.load import dump_config
from megatron_rl.distributed.config import ParallelConfig
from megatron_rl.distributed.device import Platform, init_process_group, start_platform

if TYPE_CHECKING:
    from megatron_rl.distributed.groups import ParallelGroups


def record_config(run: ConfigModel, folder: Path, given: str) -> None:
    """RUN/config.yaml from rank 0, unless that is the config it was given: then the command has written it."""
    path = folder / CONFIG_FILE
    if os.environ.get("RANK", "0") == "0" and Path(given).resolve() != path.resolve():
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(dump_config(run), encoding="utf-8")


@contextmanager
def start_rank(run: RunConfig, parallel: ParallelConfig) -> Iterator[tuple[Platform, "ParallelGroups"]]:
    """Joins this process to the run's ranks and leaves them at the end."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size != run.processes:
        raise ConfigError(
            f"run.processes must be the number of ranks torchrun started, got {run.processes} and {world_size}; "
            f"pass run.processes={world_size}"
        )
    if run.platform == "cpu":
        torch.set_num_threads(run.threads)
    platform = start_platform(run.platform)
    # Megatron-Core may be imported only after the platform was chosen.
    from megatron_rl.distributed.groups import build_groups

    init_process_group(platform, timeout_s=1800)
    try:
        yield platform, build_groups(parallel, platform, seed=run.seed)
    finally:
        dist.destroy_process_group()
