"""Training state of a run: saved as a whole, resumed bit by bit.

Folder: checkpoints/step_000020/{state/, random/rank_00000.pt, extra/<name>, config.json, meta.json}. It is written
under another name and renamed when complete, so a killed save is never the latest checkpoint.
"""

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_rl.checkpoint.config import CheckpointConfig
from megatron_rl.checkpoint.folders import (
    EXTRA_NAME,
    META_NAME,
    STATE_NAME,
    checkpoints,
    latest_checkpoint,
    new_folder,
    read_extra,
    reading,
    step_folder,
)
from megatron_rl.config import ConfigError

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer

    from megatron_rl.distributed.groups import ParallelGroups
    from megatron_rl.model.policy import PolicyModel

__all__ = ["CheckpointConfig", "latest_checkpoint", "load_training_state", "read_extra", "save_training_state"]


def save_training_state(
    folder: Path,
    *,
    step: int,
    model: "PolicyModel",
    optimizer: "MegatronOptimizer",
    groups: "ParallelGroups",
    extra: Mapping[str, bytes],
    config: CheckpointConfig,
) -> Path:
    """Saves the state after `step` optimizer steps (at least one) and drops old checkpoints. Collective.

    extra: file name -> bytes of other parts of the run; rank 0's are kept. Returns the new checkpoint's folder.
    """
    # Launchers and the orchestrator use this module to look for checkpoints; Megatron takes seconds to import.
    from megatron_rl.checkpoint.random_state import save_random_state
    from megatron_rl.checkpoint.sharded import save_sharded

    target = step_folder(Path(folder), step)
    with new_folder(target, collective=True) as partial:
        if groups.rank == 0:
            (partial / STATE_NAME).mkdir()
            (partial / "random").mkdir()
        _barrier()
        save_sharded(partial / STATE_NAME, model, groups, optimizer)
        save_random_state(_random_file(partial, groups.rank))
        if groups.rank == 0:
            (partial / EXTRA_NAME).mkdir()
            for name, data in extra.items():
                (partial / EXTRA_NAME / name).write_bytes(data)
            (partial / "config.json").write_text(json.dumps(model.hf_config, indent=2, sort_keys=True) + "\n")
            meta = {"step": step, "layout": _layout(groups), "model": _describe(model)}
            (partial / META_NAME).write_text(json.dumps(meta, indent=2) + "\n")
    if groups.rank == 0:
        for old in checkpoints(Path(folder))[: -config.keep_last]:
            shutil.rmtree(old)
    return target


def load_training_state(
    path: Path, *, model: "PolicyModel", optimizer: "MegatronOptimizer", groups: "ParallelGroups"
) -> tuple[int, dict[str, bytes]]:
    """Fills model, optimizer and random states; returns (steps done, extra). Collective.

    Another parallel layout may read it: weights and optimizer are the same numbers, but random states then stay those
    of the seed. ConfigError when it is damaged, or the state of another model or dtype.
    """
    from megatron_rl.checkpoint.random_state import load_random_state
    from megatron_rl.checkpoint.sharded import load_sharded

    path = Path(path)
    with reading(path):
        meta = json.loads((path / META_NAME).read_text())
        _check_same_model(path, saved=meta["model"], now=_describe(model))
        load_sharded(path / STATE_NAME, model, groups, optimizer)
        if meta["layout"] == _layout(groups):
            load_random_state(_random_file(path, groups.rank))
        extra = {file.name: file.read_bytes() for file in sorted((path / EXTRA_NAME).iterdir())}
    return meta["step"], extra


def _barrier() -> None:
    import torch.distributed as dist

    dist.barrier()


def _random_file(folder: Path, rank: int) -> Path:
    return folder / "random" / f"rank_{rank:05}.pt"


def _layout(groups: "ParallelGroups") -> dict[str, int]:
    return {"world_size": groups.world_size, "tensor": groups.tp_size, "expert": groups.ep_size}


def _describe(model: "PolicyModel") -> dict[str, Any]:
    """What must be equal for a state to fit; the digest covers every tensor's name and shape."""
    config = model.config
    shapes = json.dumps([(part.name, part.shape) for part in model.weight_parts])
    return {
        "architecture": model.family.architecture,
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_experts": config.num_moe_experts,
        "vocab_size": model.vocab_size,
        "dtype": str(config.params_dtype).removeprefix("torch."),
        "tensors": hashlib.sha256(shapes.encode()).hexdigest()[:16],
    }


def _check_same_model(path: Path, *, saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    different = [f"{key} {saved.get(key)} there, {now[key]} here" for key in now if saved.get(key) != now[key]]
    if different:
        raise ConfigError(
            f"checkpoint {path} must be of the model that the run file names, got: {'; '.join(different)}; "
            "restore model.path and model.dtype, or start in another run folder"
        )
