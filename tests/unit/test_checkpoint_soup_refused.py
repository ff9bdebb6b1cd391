"""What cannot be averaged is refused by name, before anything is written."""

import json
import math
import runpy
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_rl.checkpoint.soup import soup, soup_weights
from megatron_rl.config import ConfigError, DataError, RunError

HELPERS = runpy.run_path(str(Path(__file__).parents[1] / "hf_folders.py"))
write_folder = HELPERS["write_folder"]
W = {"a": torch.ones(2, 3), "b": torch.ones(4)}


def other_than(tmp_path: Path, tensors: dict[str, Tensor] | None = None, **options: Any) -> list[Path]:
    """A checkpoint of W and a second one that differs."""
    first = write_folder(tmp_path / "first", W, heads=2)
    return [first, write_folder(tmp_path / "second", W if tensors is None else tensors, **{"heads": 2, **options})]


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"a": W["a"]}, "weight b is missing"),
        ({**W, "c": torch.ones(1)}, "weight c has no counterpart"),
        ({"a": torch.ones(3, 2), "b": W["b"]}, r"weight a has shape \[3, 2\], not \[2, 3\]"),
        ({"a": torch.ones(6), "b": W["b"]}, r"weight a has shape \[6\], not \[2, 3\]"),
    ],
)
def test_other_names_and_shapes_are_refused_by_name(tmp_path: Path, tensors: dict[str, Tensor], message: str) -> None:
    sources = other_than(tmp_path, tensors)
    with pytest.raises(DataError, match=rf"second must have the weights of .*first, got: {message}"):
        soup(sources, tmp_path / "soup")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "second"]


def test_many_differences_are_counted_not_listed(tmp_path: Path) -> None:
    sources = other_than(tmp_path, {f"w{number}": torch.ones(1) for number in range(7)})
    with pytest.raises(DataError, match=r"weight a is missing; weight b is missing; .*w2 .*; and 4 more; average"):
        soup(sources, tmp_path / "soup")


def test_another_config_is_refused_by_key(tmp_path: Path) -> None:
    """But not where it only says who wrote it, or how the weights are stored."""
    written_by = {"transformers_version": "5", "_name_or_path": "x", "dtype": "float32", "use_cache": True}
    sources = other_than(tmp_path, heads=4, rope={"theta": 1}, **written_by)
    notes = r"heads 2 there, 4 here; rope nothing there, \{'theta': 1\} here"
    with pytest.raises(ConfigError, match=rf"second must have the config.json of .*first, got {notes}; average"):
        soup(sources, tmp_path / "soup")
    soup(other_than(tmp_path, **written_by), tmp_path / "soup")


@pytest.mark.parametrize("file", ["tokenizer.json", "chat_template.jinja"])
def test_another_tokenizer_is_refused_by_file(tiny: Path, tmp_path: Path, file: str) -> None:
    second = tmp_path / "second"
    shutil.copytree(tiny / "model", second)
    (second / file).write_text((second / file).read_text() + " ")
    with pytest.raises(ConfigError, match=rf"second must have the tokenizer of .*, got other contents of {file}; "):
        soup([tiny / "model", second], tmp_path / "soup")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_number_that_is_not_finite_is_refused_with_its_weight_and_leaves_no_folder(
    tmp_path: Path, value: float
) -> None:
    sources = other_than(tmp_path, {"a": W["a"], "b": torch.tensor([1.0, value, 1.0, 1.0])})
    with pytest.raises(DataError, match=r"second: weight b must hold finite numbers"):
        soup(sources, tmp_path / "soup")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "second"]


def test_a_number_that_the_dtype_cannot_hold_is_refused(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "source", {"a": torch.tensor([1e6])})
    with pytest.raises(DataError, match=r"weight a of the soup must fit float16, got 1e.06; choose another"):
        soup([source], tmp_path / "soup", dtype="float16")


def test_damaged_checkpoints_are_refused_by_file(tmp_path: Path) -> None:
    first, second = other_than(tmp_path, num_files=2)
    file = second / "model-00002-of-00002.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    with pytest.raises(ConfigError, match=rf"{file.name} must be a whole safetensors file"):
        soup([first, second], tmp_path / "soup")
    file.write_bytes(whole)
    index = second / "model.safetensors.index.json"
    tree = json.loads(index.read_text())
    tree["weight_map"]["c"] = file.name
    index.write_text(json.dumps(tree))
    with pytest.raises(DataError, match=r"second: the index names weights .* missing: c; download"):
        soup([first, second], tmp_path / "soup")
    with pytest.raises(ConfigError, match="no such folder"):
        soup([first, tmp_path / "third"], tmp_path / "soup")


def test_integers_are_refused_by_name(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "source", {"ids": torch.arange(3)})
    with pytest.raises(DataError, match=r"source: weight ids must be one of F32, BF16, F16, F8_E4M3, got I64; use"):
        soup([source], tmp_path / "soup")


def test_a_folder_with_something_in_it_is_never_written_to(tmp_path: Path) -> None:
    sources = other_than(tmp_path)
    with pytest.raises(ConfigError, match=r"must be written into a new folder, got .*second, which exists"):
        soup(sources, sources[1])
    (tmp_path / "empty").mkdir()
    assert soup(sources, tmp_path / "empty") == tmp_path / "empty"
    assert (tmp_path / "empty" / "model.safetensors").is_file()


def test_no_room_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = other_than(tmp_path)
    needed = sum(tensor.numel() * 4 for tensor in W.values())
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=needed - 1))
    with pytest.raises(ConfigError, match=r"the disk of .*soup must have room for .* GiB free; make room"):
        soup(sources, tmp_path / "soup")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=needed))
    soup(sources, tmp_path / "soup")


def test_a_disk_that_fills_up_on_the_way_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    sources = other_than(tmp_path)
    monkeypatch.setattr("megatron_rl.checkpoint.soup.copy_companions", full)
    with pytest.raises(RunError, match="soup must be written whole, got: No space left on device"):
        soup(sources, tmp_path / "soup")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "second"]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([0.5, 0.5], "be one number for each checkpoint, got 2 for 3"),
        ([0.5, 0.7, -0.2], r"be finite and not negative, got -0\.2; give"),
        ([0.5, 0.5, math.nan], "be finite and not negative, got nan"),
        ([math.inf, 0.5, 0.5], "be finite and not negative, got inf"),
        ([0.0, 0.0, 0.0], "not all be 0"),
        ([0.5, 0.25, 0.2], r"sum to 1, got 0\.95; correct them, or .*--normalise"),
        ([1.0, 1.0, 1.0], "sum to 1, got 3"),
    ],
)
def test_weights_that_are_no_shares_are_refused(weights: list[float], message: str) -> None:
    with pytest.raises(ConfigError, match=f"--weights must {message}"):
        soup_weights(3, weights)


def test_what_the_command_line_gives_is_refused_in_one_line(tmp_path: Path, error_of: Callable[..., str]) -> None:
    first, second = map(str, other_than(tmp_path))
    target = str(tmp_path / "soup")
    assert "--weights must be numbers with commas between them, got '.5;.5'" in error_of(
        "soup", first, second, target, "--weights", ".5;.5"
    )
    assert "--weights must be one number for each checkpoint, got 1 for 2" in error_of(
        "soup", first, second, target, "--weights", "1"
    )
    assert "--normalise has no effect without --weights" in error_of("soup", first, second, target, "--normalise")
    assert "must be written into a new folder" in error_of("soup", first, second, first)
    assert not Path(target).exists()
