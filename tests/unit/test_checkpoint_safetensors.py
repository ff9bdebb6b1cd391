"""safetensors files against the library that defines them."""

import random
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from megatron_rl.checkpoint.hf_files import HfFiles
from megatron_rl.checkpoint.safetensors_file import SafetensorsReader, SafetensorsWriter
from megatron_rl.config import DataError
from megatron_rl.model.hf_tensor import HfTensorSpec

TENSORS = {
    "b.bias": torch.randn(3),
    "a.weight": torch.randn(3, 5).bfloat16(),
    "a.scale": torch.randn(1, 1, 2).bfloat16(),
    "größe": torch.zeros(0, 4),
    "c": torch.randn(7).half(),
}
SPECS = [HfTensorSpec(name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in TENSORS.items()]


def test_tensors_that_come_in_any_order_make_the_librarys_file(tmp_path: Path) -> None:
    """Byte by byte for one dtype; with several, the library reads the same tensors."""
    for dtype in ("float32", "bfloat16"):
        tensors = {name: tensor.to(getattr(torch, dtype)) for name, tensor in TENSORS.items()}
        writer = SafetensorsWriter(tmp_path / dtype, [HfTensorSpec(s.name, dtype, s.shape) for s in SPECS])
        order = random.Random(0).sample(sorted(tensors), len(tensors))
        assert [writer.write(name, tensors[name]) for name in order] == [False] * 4 + [True]
        save_file(tensors, tmp_path / "library", metadata={"format": "pt"})
        assert (tmp_path / dtype).read_bytes() == (tmp_path / "library").read_bytes()
    mixed = SafetensorsWriter(tmp_path / "mixed", SPECS)
    for name, tensor in TENSORS.items():
        mixed.write(name, tensor)
    got = load_file(tmp_path / "mixed")
    assert got.keys() == TENSORS.keys()
    assert all(torch.equal(got[name], tensor) and got[name].dtype == tensor.dtype for name, tensor in TENSORS.items())


def test_the_librarys_file_is_read_tensor_by_tensor(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "file")
    with SafetensorsReader([tmp_path / "file"]) as reader:
        assert reader.shapes == {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}
        for name, tensor in TENSORS.items():
            assert torch.equal(reader.read(name), tensor)


def test_quantised_weights_are_refused_by_name(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(2, dtype=torch.int8)}, tmp_path / "file")
    with SafetensorsReader([tmp_path / "file"]) as reader, pytest.raises(DataError, match=r"weight w .* I8"):
        reader.read("w")


def test_an_index_names_the_file_of_each_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_rl.checkpoint.hf_files.MAX_SHARD_BYTES", 40)
    files = HfFiles(tmp_path, SPECS)
    for name, tensor in TENSORS.items():
        files.write(name, tensor)
    files.write_index()
    assert len(set(files.plan.values())) == 3
    for name, file in files.plan.items():
        with safe_open(tmp_path / file, framework="pt") as handle:
            assert torch.equal(handle.get_tensor(name), TENSORS[name])
