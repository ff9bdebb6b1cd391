"""tools/convert_checkpoint.py: Hugging Face to Megatron on two ranks, and back on one."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_rl.checkpoint.convert import convert
from megatron_rl.config import ConfigError

TOOL = "../../tools/convert_checkpoint.py"


def contents(folder: Path) -> dict[str, str]:
    """File name -> digest."""
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir() if file.is_file()}


def test_there_and_back_gives_the_same_bytes(
    model_folder: Path, tmp_path: Path, run_script: Callable[..., None]
) -> None:
    """Weights, config.json, tokenizer: whatever ranks wrote the checkpoint in between."""
    source, megatron, back = model_folder / "plain", tmp_path / "megatron", tmp_path / "back"
    run_script(TOOL, 2, source, megatron, "--expert", "2")
    run_script(TOOL, 1, megatron, back)
    got, expected = contents(back), contents(source)
    assert got.keys() == expected.keys()
    for name in expected.keys() - {"config.json"}:
        assert got[name] == expected[name], name
    assert json.loads((back / "config.json").read_text()) == json.loads((source / "config.json").read_text())


def test_a_folder_that_cannot_be_converted_is_refused_at_once(model_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="state/"):
        convert(model_folder / "plain", tmp_path / "out", direction="to_hf")
    with pytest.raises(ConfigError, match="no such folder"):
        convert(tmp_path / "absent", tmp_path / "out")
