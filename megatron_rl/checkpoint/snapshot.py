"""The training state of one step, as it stands or copied to host memory, and how it becomes a checkpoint folder."""

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from megatron_rl.checkpoint.adam import start_adam
from megatron_rl.checkpoint.config import CheckpointConfig
from megatron_rl.checkpoint.folders import (
    EXTRA_NAME,
    META_NAME,
    STATE_NAME,
    begin_folder,
    complete_folder,
    latest_checkpoint,
    partial_folder,
    remove_leftovers,
    remove_old,
    step_folder,
)
from megatron_rl.checkpoint.identity import describe_model, describe_tokenizer
from megatron_rl.checkpoint.pieces import Piece, training_pieces
from megatron_rl.checkpoint.random_state import random_state
from megatron_rl.checkpoint.torch_dist import write_pieces
from megatron_rl.config import RunError
from megatron_rl.distributed.device import PlatformKind
from megatron_rl.distributed.groups import ParallelGroups
from megatron_rl.model.policy import PolicyModel

Result = TypeVar("Result")
Buffers = dict[tuple[str, tuple[int, ...]], Tensor]
"""Host memory of each piece, used again by every save."""


@dataclass(frozen=True)
class Snapshot:
    """What this rank writes after `step` optimizer steps."""

    step: int
    pieces: list[Piece]
    random: bytes
    extra: Mapping[str, bytes]
    """File name -> bytes of other parts of the run; rank 0's are written."""
    config: str
    """config.json of the model."""
    meta: str
    """meta.json: what it is a checkpoint of."""

    def on_host(self, buffers: Buffers) -> "Snapshot":
        """A copy that training no longer changes."""
        pieces = [_copied(piece, buffers) for piece in self.pieces]
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return dataclasses.replace(self, pieces=pieces)


def snapshot_together(step: int, take: Callable[[], Snapshot], group: dist.ProcessGroup | None = None) -> Snapshot:
    """What take returns on this rank. Collective over group: RunError on every rank when it fails on any of them."""
    try:
        return _together(group, take)
    except RunError as error:
        raise RunError(
            f"a checkpoint of step {step} must hold the state of every rank, got on one of them: "
            f"{' '.join(str(error).split())}; mend that, then start again from the latest checkpoint"
        ) from error


def take_snapshot(
    step: int,
    *,
    model: PolicyModel,
    optimizer: MegatronOptimizer,
    groups: ParallelGroups,
    extra: Mapping[str, bytes],
    model_path: Path | None,
) -> Snapshot:
    """The state as it stands, nothing copied but random states. model_path: of the tokenizer; None records none."""
    start_adam(optimizer)
    dtype = str(model.config.params_dtype).removeprefix("torch.")
    meta: dict[str, Any] = {
        "step": step,
        "layout": layout(groups),
        "platform": platform_of(model),
        "model": describe_model(model.hf_config, dtype),
    }
    if model_path is not None:
        meta["tokenizer"] = describe_tokenizer(model_path)
    return Snapshot(
        step=step,
        pieces=training_pieces(model, groups, optimizer, every_replica=False),
        random=random_state(),
        extra=extra,
        config=json.dumps(model.hf_config, indent=2, sort_keys=True) + "\n",
        meta=json.dumps(meta, indent=2) + "\n",
    )


def platform_of(model: PolicyModel) -> PlatformKind:
    """The platform that a model with numbers trains on: it decides what tensors there are."""
    return "cuda" if next(model.parameters()).is_cuda else "cpu"


def layout(groups: ParallelGroups) -> dict[str, int]:
    """The sizes by which ranks share the model: random states belong to one layout."""
    return {
        "world_size": groups.world_size,
        "tensor": groups.tp_size,
        "context": groups.cp_size,
        "pipeline": groups.pp_size,
        "expert": groups.ep_size,
        "expert_tensor": groups.etp_size,
    }


def random_file(folder: Path, rank: int) -> Path:
    """Random states of a rank inside a checkpoint."""
    return folder / "random" / f"rank_{rank:05}.pt"


def write_snapshot(
    folder: Path, snapshot: Snapshot, config: CheckpointConfig, group: dist.ProcessGroup | None = None
) -> Path:
    """The new checkpoint below folder, whole or not at all; then old ones go. Collective over group.

    A step that was saved already is not written again: a run that was stopped between two saves ends up there.
    RunError on every rank when any of them cannot write: what was written is removed, older checkpoints stay.
    """
    target, rank = step_folder(folder, snapshot.step), dist.get_rank()
    partial = partial_folder(target)
    try:
        # Rank 0 decides for all: another machine may see a folder on a shared disk later.
        exists = [_together(group, lambda: (target / META_NAME).is_file())]
        dist.broadcast_object_list(exists, src=0, group=group)
        if exists[0]:
            return target
        _together(group, lambda: _begin(target) if rank == 0 else None)
        _together(group, lambda: random_file(partial, rank).write_bytes(snapshot.random))
        write_pieces(partial / STATE_NAME, snapshot.pieces, group)
        _together(group, lambda: _complete(target, snapshot, config) if rank == 0 else None)
    except (OSError, RuntimeError, RunError) as error:
        latest = latest_checkpoint(folder)
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        cause = error.strerror if isinstance(error, OSError) else str(error)
        raise RunError(
            f"{folder} must take a whole checkpoint, got while writing {target.name}: {' '.join(str(cause).split())}; "
            f"make room there or mend that, then start again: {latest.name if latest else 'step 0'} is the latest"
        ) from error
    return target


def _begin(target: Path) -> None:
    remove_leftovers(target.parent)
    begin_folder(target)
    for name in (STATE_NAME, "random", EXTRA_NAME):
        (partial_folder(target) / name).mkdir()


def _complete(target: Path, snapshot: Snapshot, config: CheckpointConfig) -> None:
    partial = partial_folder(target)
    for name, data in snapshot.extra.items():
        (partial / EXTRA_NAME / name).write_bytes(data)
    (partial / "config.json").write_text(snapshot.config)
    (partial / META_NAME).write_text(snapshot.meta)
    complete_folder(target)
    remove_old(target.parent, config)


def _together(group: dist.ProcessGroup | None, action: Callable[[], Result]) -> Result:
    """Runs action on every rank and waits for all; its result here. RunError on each of them when one has failed."""
    outcome: Result | Exception
    try:
        outcome = action()
    except Exception as error:  # whatever it is, the others must not wait for this rank
        outcome = error
    problems: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(problems, _problem(outcome) if isinstance(outcome, Exception) else None, group=group)
    if isinstance(outcome, Exception) or any(problems):
        cause = outcome if isinstance(outcome, Exception) else None
        raise RunError(next(filter(None, problems))) from cause
    return outcome


def _problem(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{type(error).__name__}: {error}"


def _copied(piece: Piece, buffers: Buffers) -> Piece:
    source = piece.resolve()
    place = (piece.key, piece.offsets)
    if place not in buffers:
        buffers[place] = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
    buffers[place].copy_(source, non_blocking=True)
    return dataclasses.replace(piece, resolve=lambda: buffers[place])
