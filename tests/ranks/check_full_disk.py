"""Run by torchrun on two ranks: saves into a folder that takes one checkpoint and a half, then none at all.

Arguments: HF folder, work folder, folder of the small file system or "" where none could be mounted: then a limit on
the size of files stands for the full disk. Rank r writes {case: message} to errors-r.json.
"""

import json
import os
import resource
import subprocess
import sys
import unittest.mock
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.distributed.device import init_process_group, start_platform

PLATFORM = start_platform("cpu")

from megatron_rl.checkpoint import snapshot  # noqa: E402
from megatron_rl.checkpoint.convert import load_hf  # noqa: E402
from megatron_rl.checkpoint.resume import CheckpointConfig, latest_checkpoint, load_training_state  # noqa: E402
from megatron_rl.checkpoint.writer import CheckpointWriter  # noqa: E402
from megatron_rl.config import RunError  # noqa: E402
from megatron_rl.distributed.groups import ParallelConfig, ParallelGroups, build_groups  # noqa: E402
from megatron_rl.model.build import ModelConfig, build_model  # noqa: E402
from megatron_rl.trainer.config import OptimizerConfig  # noqa: E402
from megatron_rl.trainer.optim import PolicyOptimizer  # noqa: E402


def message_of(save: Callable[[], object]) -> str:
    try:
        save()
    except RunError as error:
        return str(error)
    return "saved"


@contextmanager
def small_files(num_bytes: int) -> Iterator[None]:
    """This process cannot make a file larger than that."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def policy_of(folder: Path, groups: ParallelGroups) -> PolicyOptimizer:
    model = build_model(ModelConfig(path=str(folder)), ParallelConfig(), groups, PLATFORM)
    load_hf(model, folder, groups)
    return PolicyOptimizer(model, groups, OptimizerConfig())


def fill_up(
    state: dict[str, Any], folder: Path, elsewhere: Path, groups: ParallelGroups, *, limited: bool
) -> dict[str, str]:
    """Messages of a save that fails at once, one that fails in the background, and one on one rank only."""
    errors = {}
    config = CheckpointConfig(keep_last=2)
    writer = CheckpointWriter(folder, groups, config)
    background = CheckpointWriter(folder, groups, config.model_copy(update={"asynchronous": True}))
    writer.save(1, extra={}, **state)
    with small_files(200_000 if limited else resource.RLIM_INFINITY):
        errors["full"] = message_of(lambda: writer.save(2, extra={}, **state))
        background.save(2, extra={}, **state)
        errors["full, in the background"] = message_of(background.wait)
    errors["after it"] = message_of(background.wait)
    with small_files(100_000 if groups.rank == 1 else resource.RLIM_INFINITY):
        roomy = CheckpointWriter(elsewhere, groups, config)
        errors["full on one rank"] = message_of(lambda: roomy.save(2, extra={}, **state))
    return errors


def fail_otherwise(state: dict[str, Any], folder: Path, groups: ParallelGroups) -> dict[str, str]:
    """Messages of saves that fail on one rank for another reason than the disk's."""
    errors = {}
    writer = CheckpointWriter(folder, groups, CheckpointConfig())
    failing = KeyError("exp_avg") if groups.rank == 1 else None
    with unittest.mock.patch(
        "megatron_rl.checkpoint.writer.take_snapshot", side_effect=failing, wraps=snapshot.take_snapshot
    ):
        errors["no state on one rank"] = message_of(lambda: writer.save(2, extra={}, **state))
    no_bytes: Any = {"data": "text"}
    errors["extra state that is no bytes"] = message_of(lambda: writer.save(2, extra=no_bytes, **state))
    dist.barrier()  # rank 0 has removed what it began
    errors["left of those"] = " ".join(path.name for path in folder.iterdir())
    return errors


def main() -> None:
    model_path, work, small = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    init_process_group(PLATFORM)
    groups = build_groups(ParallelConfig(), PLATFORM, seed=1)
    policy = policy_of(model_path, groups)
    state: dict[str, Any] = dict(model=policy.ddp.module, optimizer=policy.optimizer)
    folder = Path(small or work) / "checkpoints"
    errors = fill_up(state, folder, work / "elsewhere", groups, limited=not small)
    errors |= fail_otherwise(state, work / "otherwise", groups)
    latest = latest_checkpoint(folder)
    assert latest is not None
    errors["left"] = " ".join(sorted(path.name for path in folder.iterdir()))
    load_training_state(latest, groups=groups, **state)
    dist.barrier()
    if groups.rank == 0 and small:
        subprocess.run(["mount", "-o", "remount,ro", small], check=True)
    elif groups.rank == 0:
        (work / "file").write_text("")
    dist.barrier()
    nowhere = CheckpointWriter(folder if small else work / "file" / "checkpoints", groups, CheckpointConfig())
    errors["cannot be written"] = message_of(lambda: nowhere.save(3, extra={}, **state))
    (work / f"errors-{groups.rank}.json").write_text(json.dumps(errors))
    dist.destroy_process_group()
    os.sync()


if __name__ == "__main__":
    main()
