"""Checkpoint folders as a file system sees them: where they are, and how they appear whole. Imports no Megatron."""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from megatron_rl.checkpoint.config import CheckpointConfig
from megatron_rl.config import ConfigError, DataError, RunError

META_NAME = "meta.json"
"""Written last into a training checkpoint: what it is a checkpoint of."""
STATE_NAME = "state"
"""Subfolder with the sharded tensors."""
EXTRA_NAME = "extra"
"""Subfolder with one file per part of the run that keeps state of its own."""
_STEP_NAME = re.compile(r"step_(\d{6,})")
_PARTIAL, _OLD = ".partial", ".old"


def step_folder(folder: Path, step: int) -> Path:
    """checkpoints/step_000020"""
    return folder / f"step_{step:06}"


def checkpoint_step(path: Path) -> int:
    """The step a checkpoint folder is named after."""
    match = _STEP_NAME.fullmatch(path.name)
    assert match, f"{path} is not named after a step"
    return int(match[1])


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints below folder, oldest step first."""
    return [path for path in step_folders(folder) if (path / META_NAME).is_file()]


def step_folders(folder: Path) -> list[Path]:
    """What is named after a step below folder, oldest step first; nothing that is still being written."""
    if not folder.is_dir():
        return []
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := _STEP_NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def latest_checkpoint(folder: Path) -> Path | None:
    """The complete checkpoint of the highest step below folder; None when there is none."""
    complete = checkpoints(Path(folder))
    return complete[-1] if complete else None


def read_extra(path: Path, name: str) -> bytes:
    """What the part of the run called name gave to save_training_state. KeyError lists the names there are."""
    file = Path(path) / EXTRA_NAME / name
    if not file.is_file():
        names = sorted(f.name for f in file.parent.iterdir()) if file.parent.is_dir() else []
        raise KeyError(f"checkpoint {path} holds no state called {name!r}, only {names}")
    return file.read_bytes()


@contextmanager
def reading(path: Path, *, cure: str | None = None) -> Iterator[None]:
    """Turns whatever reading a damaged checkpoint raises into a ConfigError that names it and the way out.

    cure None: path is a run's, which can go on without it.
    """
    try:
        yield
    except (ConfigError, DataError, RunError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # torch's CheckpointException is no Exception
        raise ConfigError(
            f"checkpoint {path} must be whole, got {type(error).__name__} while reading it: "
            f"{' '.join(str(error).split())[:200]}; {cure or _way_on(path)}"
        ) from error


def check_whole(folder: Path) -> None:
    """ConfigError for a checkpoint below folder without the file that is written last: a save never leaves one so."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if _STEP_NAME.fullmatch(path.name) and not (path / META_NAME).is_file():
            raise ConfigError(f"checkpoint {path} must be whole, got none of its {META_NAME}; {_way_on(path)}")


def _way_on(path: Path) -> str:
    earlier = [other for other in checkpoints(path.parent) if checkpoint_step(other) < checkpoint_step(path)]
    return f"move it away to {f'go on from {earlier[-1].name}' if earlier else 'start from step 0'}"


@contextmanager
def new_folder(target: Path, *, collective: bool = False) -> Iterator[Path]:
    """Yields an empty folder that takes target's name, and its place, when the block ends without an exception.

    collective: every rank enters; rank 0 makes and renames the folder and the others wait for it. What a killed writer
    has left behind is removed by the next one. After an exception nothing is left; RunError where the disk does not
    take it.
    """
    partial = partial_folder(target)
    writes = not collective or dist.get_rank() == 0
    try:
        if writes:
            begin_folder(target)
        _wait(collective)
        yield partial
        _wait(collective)
        if writes:
            complete_folder(target)
        _wait(collective)
    except BaseException as error:  # torch's CheckpointException is no Exception
        shutil.rmtree(partial, ignore_errors=True)
        if not isinstance(error, OSError):
            raise
        raise RunError(
            f"{target} must be written whole, got: {error.strerror or error}; make room there or mend the disk, "
            "then start again"
        ) from error


def partial_folder(target: Path) -> Path:
    """Where target is written until it is whole."""
    return target.with_name(target.name + _PARTIAL)


def begin_folder(target: Path) -> None:
    """Makes an empty folder to write target into."""
    partial = partial_folder(target)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def complete_folder(target: Path) -> None:
    """Gives what was written target's name, once it is on the disk."""
    partial, old = partial_folder(target), target.with_name(target.name + _OLD)
    _sync_files(partial)
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    partial.rename(target)
    _sync(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def remove_leftovers(folder: Path) -> None:
    """Removes what killed writers have left below a folder of checkpoints."""
    for path in folder.glob("step_*"):
        if path.name.endswith((_PARTIAL, _OLD)):
            shutil.rmtree(path, ignore_errors=True)


def remove_old(folder: Path, config: CheckpointConfig) -> None:
    """Removes checkpoints that are neither among the newest nor of a step that is kept for ever."""
    for path in checkpoints(folder)[: -config.keep_last]:
        if config.keep_every_steps is None or checkpoint_step(path) % config.keep_every_steps:
            remove_step(path)


def remove_step(path: Path) -> None:
    """Removes what is named after a step; under another name first, since half of it must not look like one."""
    shutil.rmtree(path.rename(path.with_name(path.name + _OLD)))


def _wait(collective: bool) -> None:
    if collective:
        dist.barrier()


def _sync_files(folder: Path) -> None:
    """A rename must not reach the disk before what it names."""
    for path in [folder, *folder.rglob("*")]:
        _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
