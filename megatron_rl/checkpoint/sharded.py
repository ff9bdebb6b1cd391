"""Model and optimizer as Megatron's torch_dist checkpoint, which any parallel layout can read."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.optimizer import MegatronOptimizer
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from megatron_rl.distributed.groups import ParallelGroups
from megatron_rl.model.policy import PolicyModel


def save_sharded(
    folder: Path, model: PolicyModel, groups: ParallelGroups, optimizer: MegatronOptimizer | None = None
) -> None:
    """Every rank writes its main replicas into the existing empty folder. Collective.

    The optimizer must have made a step: before it, there is no state to save.
    """
    state = _sharded_state(model, groups, optimizer, is_loading=False)
    with _without_deprecations():
        dist_checkpointing.save(state, str(folder), _InProcessSave("torch_dist", 1))


def load_sharded(
    folder: Path, model: PolicyModel, groups: ParallelGroups, optimizer: MegatronOptimizer | None = None
) -> None:
    """Fills model and optimizer, whatever layout wrote them; every parameter is proven written. Collective."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    state = _sharded_state(model, groups, optimizer, is_loading=True)
    with _without_deprecations():
        loaded: Any = dist_checkpointing.load(state, str(folder))
    model.load_state_dict(loaded["model"])
    unwritten = [name for name, parameter in model.named_parameters() if bool(parameter.isnan().any())]
    assert not unwritten, f"loading {folder} left {unwritten} unwritten"
    if optimizer is not None:
        optimizer.load_state_dict(loaded["optimizer"])


@contextmanager
def _without_deprecations() -> Iterator[None]:
    """Megatron still uses torch's older checkpoint calls; its users can do nothing about that."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


class _InProcessSave(TorchDistSaveShardedStrategy):
    """torch_dist written by this process itself.

    Megatron's own writer starts a manager process that outlives a killed trainer, forks for every save, and asks CUDA
    to synchronise; the files are the same.
    """

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        state, *_ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        state_dict_saver.save(
            mcore_to_pyt_state_dict(state, False),
            storage_writer=FileSystemWriter(checkpoint_dir),
            planner=MCoreSavePlanner(
                dedup_replicated_tensors=not self.keep_only_main_replica, flatten_state_dict=False
            ),
        )


def _sharded_state(
    model: PolicyModel, groups: ParallelGroups, optimizer: MegatronOptimizer | None, *, is_loading: bool
) -> dict[str, Any]:
    metadata = {
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": groups.pg.dp_cp,
    }
    state: dict[str, Any] = {"model": model.sharded_state_dict(metadata=metadata)}
    if optimizer is not None:
        state["optimizer"] = optimizer.sharded_state_dict(state["model"], is_loading=is_loading, metadata=metadata)
    return state
