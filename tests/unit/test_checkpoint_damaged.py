"""Damaged checkpoints: the error names the folder and the way out."""

from pathlib import Path

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from megatron_rl.checkpoint.folders import latest_checkpoint, read_extra, reading, step_folder
from megatron_rl.config import ConfigError


def checkpoint(folder: Path, step: int) -> Path:
    path = step_folder(folder, step)
    path.mkdir()
    (path / "meta.json").write_text("{}")
    return path


def test_a_damaged_checkpoint_is_named_with_the_one_before(tmp_path: Path) -> None:
    checkpoint(tmp_path, 2)
    newest = checkpoint(tmp_path, 4)
    (tmp_path / "step_000006.partial").mkdir()
    (tmp_path / "step_000008").mkdir()  # no meta.json: never complete
    assert latest_checkpoint(tmp_path) == newest
    with pytest.raises(ConfigError, match=f"{newest} must be whole.*KeyError.*go on from step_000002"), reading(newest):
        read_extra(newest, "orchestrator")


def test_the_only_checkpoint_leaves_the_start(tmp_path: Path) -> None:
    only = checkpoint(tmp_path, 2)
    with pytest.raises(ConfigError, match="start from step 0"), reading(only):
        raise CheckpointException("truncated", {})  # a BaseException
    with pytest.raises(ConfigError, match="another model"), reading(only):
        raise ConfigError("another model")
