"""What a conversion says about the platform of a checkpoint and about a missing tokenizer."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from megatron_rl.checkpoint import conversion
from megatron_rl.checkpoint.conversion import start_conversion, tokenizer_note
from megatron_rl.checkpoint.identity import describe_model
from megatron_rl.cli.main import app
from megatron_rl.config import ConfigError


def checkpoint(tiny: Path, tmp_path: Path, **meta: str) -> Path:
    """A run's checkpoint as far as a conversion looks at it before it reads tensors."""
    folder = tmp_path / "step_000004"
    (folder / "state").mkdir(parents=True)
    shutil.copyfile(tiny / "model" / "config.json", folder / "config.json")
    model = describe_model(json.loads((folder / "config.json").read_text()), "bfloat16")
    (folder / "meta.json").write_text(json.dumps({"step": 4, "model": model, **meta}))
    return folder


def test_a_checkpoint_is_converted_on_the_platform_it_names(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversion, "start_platform", lambda kind: kind)
    saved = checkpoint(tiny, tmp_path, platform="cuda")
    assert start_conversion(saved) == start_conversion(saved, "cuda") == "cuda"
    with pytest.raises(ConfigError, match=r"--platform must be .* got cpu, but .* was saved on cuda; leave"):
        start_conversion(saved, "cpu")
    old = checkpoint(tiny, tmp_path / "old")
    assert (start_conversion(old), start_conversion(old, "cuda")) == ("cpu", "cuda")
    assert (start_conversion(tiny / "model"), start_conversion(tiny / "model", "cuda")) == ("cpu", "cuda")


def test_a_checkpoint_of_gpus_needs_one_to_be_converted(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error_of: Callable[..., str]
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    saved = checkpoint(tiny, tmp_path, platform="cuda")
    error = error_of("convert", str(saved), str(tmp_path / "out"))
    assert f"{saved}, saved on cuda, must be converted on a machine with a GPU" in error and "got 0 GPUs" in error
    error = error_of("convert", str(tiny / "model"), str(tmp_path / "out"), "--platform", "cuda")
    assert "a checkpoint of platform cuda must be converted" in error and "got 0 GPUs" in error
    assert not (tmp_path / "out").exists()


def test_a_folder_without_a_tokenizer_is_said_to_have_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(_source: Path, target: Path, **_options: Any) -> Path:
        target.mkdir()
        return target

    monkeypatch.setattr("megatron_rl.checkpoint.convert.convert", convert)
    target = tmp_path / "hf"
    result = CliRunner().invoke(app, ["convert", str(tmp_path), str(target)])
    assert result.exit_code == 0
    assert result.stderr.startswith(f"note: {target} has no tokenizer") and "--hf-source" in result.stderr
    (target / "tokenizer.json").write_text("{}")
    assert tokenizer_note(target) is None
    (tmp_path / "megatron" / "state").mkdir(parents=True)
    assert tokenizer_note(tmp_path / "megatron") is None, "a checkpoint needs none"
