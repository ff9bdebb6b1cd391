"""Folders that appear whole or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

PARTIAL_SUFFIX = ".partial"


@contextmanager
def new_folder(target: Path, group_world: object | None = None) -> Iterator[Path]:
    """Yields an empty folder that takes target's name, and place, when the block ends without an exception.

    With group_world the block is collective: rank 0 makes and renames the folder, others wait. What a killed writer
    leaves behind is removed by the next one.
    """
    partial = target.with_name(target.name + PARTIAL_SUFFIX)
    collective = group_world is not None
    first = not collective or dist.get_rank() == 0
    if first:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    if collective:
        dist.barrier()
    yield partial
    if collective:
        dist.barrier()
    if first:
        _replace(partial, target)
    if collective:
        dist.barrier()


def _replace(partial: Path, target: Path) -> None:
    for file in partial.rglob("*"):
        if file.is_file():
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
    old = target.with_name(target.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    partial.rename(target)
    shutil.rmtree(old, ignore_errors=True)
