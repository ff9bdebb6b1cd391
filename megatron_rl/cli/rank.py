"""Entering and leaving the world of ranks."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist

from megatron_rl.cli.runs import RlRun, RunConfig, SftRun
from megatron_rl.config import ConfigError
from megatron_rl.distributed.config import ParallelConfig
from megatron_rl.distributed.device import Platform, init_process_group, start_platform

if TYPE_CHECKING:
    from megatron_rl.distributed.groups import ParallelGroups

CHECKED = "MEGATRON_RL_CHECKED"
"""Set by the command for the ranks it starts: it has checked their config and holds their run folder."""
Run = TypeVar("Run", SftRun, RlRun)


@contextmanager
def own_run(run: Run, check: Callable[[Run], None]) -> Iterator[None]:
    """For ranks that torchrun or Slurm started: what the megatron-rl command has done for its own.

    Rank 0 checks the config, holds the run folder while the block runs and writes RUN/config.yaml; the others wait for
    it in the rendezvous. ConfigError or DataError for what does not fit.
    """
    if CHECKED in os.environ or os.environ.get("RANK", "0") != "0":
        yield
        return
    # It draws in what the command needs to start engines.
    from megatron_rl.cli.launch import hold_run_folder

    check(run)
    with hold_run_folder(run):
        yield


@contextmanager
def start_rank(
    run: RunConfig, parallel: ParallelConfig, *, longest_wait_s: float = 0.0
) -> Iterator[tuple[Platform, "ParallelGroups"]]:
    """Joins this process to the run's ranks and leaves them at the end.

    longest_wait_s: how long one rank may wait for somebody outside while the others wait for it in a collective.
    """
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

    init_process_group(platform, timeout_s=1800 + longest_wait_s)
    try:
        yield platform, build_groups(parallel, platform, seed=run.seed)
    finally:
        dist.destroy_process_group()
