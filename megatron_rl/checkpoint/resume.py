"""Training state of a run: saved as a whole, resumed bit by bit.

Folder: checkpoints/step_000020/{state/, random/rank_00000.pt, extra/<name>, config.json, meta.json}. It is written
under another name and renamed when complete, so a killed save is never the latest checkpoint.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_rl.checkpoint.config import CheckpointConfig
from megatron_rl.checkpoint.folders import EXTRA_NAME, META_NAME, STATE_NAME, latest_checkpoint, read_extra, reading
from megatron_rl.checkpoint.identity import check_same, describe_model, describe_tokenizer

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
    model_path: Path | None = None,
) -> Path:
    """Saves the state after `step` optimizer steps and drops old checkpoints; returns the new folder. Collective.

    extra: file name -> bytes of other parts of the run; rank 0's are kept. model_path: the folder with the tokenizer,
    whose digest is kept too. RunError on every rank when it cannot be written.
    """
    # Launchers and the orchestrator use this module to look for checkpoints; Megatron takes seconds to import.
    from megatron_rl.checkpoint.snapshot import Snapshot, snapshot_together, take_snapshot, write_snapshot

    def take() -> Snapshot:
        return take_snapshot(step, model=model, optimizer=optimizer, groups=groups, extra=extra, model_path=model_path)

    return write_snapshot(Path(folder), snapshot_together(step, take), config)


def load_training_state(
    path: Path,
    *,
    model: "PolicyModel",
    optimizer: "MegatronOptimizer",
    groups: "ParallelGroups",
    model_path: Path | None = None,
) -> tuple[int, dict[str, bytes]]:
    """Fills model, optimizer and random states; returns (steps done, extra). Every rank reads what it holds.

    Another parallel layout may read it: weights and optimizer are the same numbers, but random states then stay those
    of the seed. ConfigError when it is damaged, was saved on another platform, is the state of another model or dtype,
    or was trained with another tokenizer than that of model_path (None: not compared).
    """
    from megatron_rl.checkpoint.random_state import load_random_state
    from megatron_rl.checkpoint.sharded import load_sharded
    from megatron_rl.checkpoint.snapshot import layout, platform_of, random_file

    path = Path(path)
    with reading(path):
        meta = json.loads((path / META_NAME).read_text())
        now = describe_model(model.hf_config, str(model.config.params_dtype).removeprefix("torch."))
        tokenizer = meta.get("tokenizer", {}) if model_path is None else describe_tokenizer(model_path)
        check_same(path, meta, model=now, tokenizer=tokenizer, platform=platform_of(model))
        load_sharded(path / STATE_NAME, model, groups, optimizer)
        if meta["layout"] == layout(groups):
            load_random_state(random_file(path, groups.rank))
        extra = {file.name: file.read_bytes() for file in sorted((path / EXTRA_NAME).iterdir())}
    return meta["step"], extra
