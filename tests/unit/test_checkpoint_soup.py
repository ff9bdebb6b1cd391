"""Soups of checkpoints against exact arithmetic, bit by bit where all are equal, and the memory they take."""

import filecmp
import json
import math
import runpy
import shutil
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_rl.checkpoint import soup as soup_module
from megatron_rl.checkpoint.soup import soup, soup_weights
from megatron_rl.config import DataError

TESTS = Path(__file__).parents[1]
HELPERS = runpy.run_path(str(TESTS / "hf_folders.py"))
write_folder, read_folder = HELPERS["write_folder"], HELPERS["read_folder"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SIGNIFICAND_BITS = {"float32": 24, "bfloat16": 8, "float16": 11}


def any_bits(dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Every finite number of a 16-bit dtype, or 80,000 of float32: both zeros and subnormal numbers among them."""
    if dtype.itemsize == 2:
        numbers = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    else:
        bits = torch.randint(-(2**31), 2**31, (80_000,), generator=torch.Generator().manual_seed(seed))
        numbers = torch.cat([bits.to(torch.int32).view(dtype), torch.tensor([0.0, -0.0, 2.0**-149, -(2.0**-149)])])
    return numbers[numbers.isfinite()]


def random_tensors(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "norm": (7,),
        "layers.0.up": (129, 37),
        "layers.0.experts": (3, 11, 5),
        "scalar": (),
        "none": (0, 4),
        "never": (4, 0),
    }
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


@pytest.mark.parametrize("weights", [None, [0.1, 0.2, 0.7], [0.3, 0.3, 0.3, 0.1], [1 / 7] * 7], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_soup_of_equal_checkpoints_is_the_checkpoint_bit_by_bit(
    tmp_path: Path, dtype: str, weights: list[float] | None
) -> None:
    """Three of them where the weights are equal: 1/3 is no float."""
    tensors = {"w": any_bits(DTYPES[dtype]), "matrix": any_bits(DTYPES[dtype], 1)[:60_000].view(400, 150)}
    source = write_folder(tmp_path / "source", tensors, dtype=dtype)
    count = len(weights) if weights else 3
    soup([source] * count, tmp_path / "soup", weights=soup_weights(count, weights))
    assert filecmp.cmp(source / "model.safetensors", tmp_path / "soup" / "model.safetensors", shallow=False)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_soup_of_equal_real_checkpoints_is_every_file_of_the_checkpoint(
    tiny: Path, tmp_path: Path, dtype: str
) -> None:
    source = tmp_path / "model"
    shutil.copytree(tiny / "model", source)
    if dtype != "float32":
        tensors = {name: tensor.to(DTYPES[dtype]) for name, tensor in read_folder(source).items()}
        HELPERS["save_file"](tensors, source / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((source / "config.json").read_text()) | {"dtype": dtype}
        (source / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    soup([source] * 3, tmp_path / "soup")
    names = sorted(file.name for file in source.iterdir())
    assert names == sorted(file.name for file in (tmp_path / "soup").iterdir()) and len(names) == 6
    assert filecmp.cmpfiles(source, tmp_path / "soup", names, shallow=False) == (names, [], [])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_weighted_soup_is_the_exact_sum_rounded_once(
    tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within half a unit in the last place of sums of fractions, whatever the pieces. On top come 2^-20 of it, for the
    second rounding on the way to 16 bits, and what float64 rounds off three terms."""
    weights = [0.55, 0.35, 0.1]
    members = [random_tensors(seed, DTYPES[dtype]) for seed in range(3)]
    sources = [write_folder(tmp_path / str(seed), tensors, num_files=seed + 1) for seed, tensors in enumerate(members)]
    soup(sources, tmp_path / "soup", weights=weights)
    got = read_folder(tmp_path / "soup")
    assert got.keys() == members[0].keys()
    for name, tensor in got.items():
        assert tensor.dtype == DTYPES[dtype] and tensor.shape == members[0][name].shape
        columns = zip(*(member[name].flatten().tolist() for member in members), strict=True)
        for number, column in zip(tensor.flatten().tolist(), columns, strict=True):
            terms = [Fraction(weight) * Fraction(value) for weight, value in zip(weights, column, strict=True)]
            unit = Fraction(math.ulp(number)) * 2 ** (53 - SIGNIFICAND_BITS[dtype])
            budget = unit / 2 * (1 + Fraction(1, 2**20)) + sum(map(abs, terms)) / 2**51
            assert abs(Fraction(number) - sum(terms)) <= budget, name
    monkeypatch.setattr(soup_module, "PIECE_NUMBERS", 100)
    soup(sources, tmp_path / "pieces", weights=weights)
    assert all(torch.equal(tensor, got[name]) for name, tensor in read_folder(tmp_path / "pieces").items())


def test_several_files_in_and_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sources may be split otherwise than the soup, whose index names the file of each tensor."""
    tensors = random_tensors(0)
    sources = [write_folder(tmp_path / str(number), tensors, num_files=number) for number in (1, 2, 4)]
    monkeypatch.setattr("megatron_rl.checkpoint.hf_files.MAX_SHARD_BYTES", 1000)
    soup(sources, tmp_path / "soup")
    index = json.loads((tmp_path / "soup" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.numel() * 4 for tensor in tensors.values())
    assert len(set(index["weight_map"].values())) == len(list((tmp_path / "soup").glob("*.safetensors"))) > 1
    for name, file in index["weight_map"].items():
        assert torch.equal(HELPERS["load_file"](tmp_path / "soup" / file)[name], tensors[name])


def test_a_checkpoint_without_a_share_is_not_read(tmp_path: Path) -> None:
    """So a soup at a corner is that checkpoint, -0.0 included; the files of the first go along all the same."""
    one = write_folder(tmp_path / "one", {"w": torch.tensor([1.0, -0.0])})
    other = write_folder(tmp_path / "other", {"w": torch.tensor([math.nan, 1.0])})
    soup([other, one], tmp_path / "soup", weights=[0.0, 1.0])
    assert filecmp.cmp(one / "model.safetensors", tmp_path / "soup" / "model.safetensors", shallow=False)


def test_dtype_is_that_of_the_weights_but_not_of_what_a_model_keeps_wider(tmp_path: Path) -> None:
    """A float32 routing bias among bfloat16 weights stays float32 under --dtype float16."""
    tensors = {"w": torch.randn(9, 9).bfloat16(), "bias": torch.randn(9) / 3}
    source = write_folder(tmp_path / "source", tensors, torch_dtype="bfloat16", rope=1)
    soup([source, source], tmp_path / "same")
    assert {name: t.dtype for name, t in read_folder(tmp_path / "same").items()} == {
        "w": torch.bfloat16,
        "bias": torch.float32,
    }
    soup([source, source], tmp_path / "half", dtype="float16")
    got = read_folder(tmp_path / "half")
    assert torch.equal(got["w"], tensors["w"].half()) and torch.equal(got["bias"], tensors["bias"])
    config = json.loads((tmp_path / "half" / "config.json").read_text())
    assert config == {"model_type": "made_up", "rope": 1, "torch_dtype": "float16"}


def test_checkpoints_of_two_dtypes_need_a_choice(tmp_path: Path) -> None:
    exact = torch.randn(40, 40)
    sources = [
        write_folder(tmp_path / dtype, {"w": exact.to(DTYPES[dtype])}, dtype=dtype) for dtype in ("float32", "bfloat16")
    ]
    with pytest.raises(DataError, match=r"weight w must have one dtype, got float32 in .* and bfloat16 in .*--dtype"):
        soup(sources, tmp_path / "soup")
    soup(sources, tmp_path / "soup", dtype="float32")
    expected = ((exact.double() + exact.bfloat16().double()) / 2).float()
    assert torch.equal(read_folder(tmp_path / "soup")["w"], expected)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=6).filter(any))
def test_normalised_weights_keep_their_ratios_and_sum_to_one(weights: list[float]) -> None:
    got = soup_weights(len(weights), weights, normalise=True)
    assert abs(sum(map(Fraction, got)) - 1) < Fraction(1, 2**50)
    total = sum(map(Fraction, weights))
    assert all(abs(share - Fraction(weight) / total) < 2**-50 for share, weight in zip(got, weights, strict=True))


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_a_soup_takes_less_memory_than_two_tensors(tmp_path: Path, kind: str) -> None:
    """Of three checkpoints with one tensor of 2^23 numbers; what a tensor takes is counted as it is stored."""
    tensors = {"w": torch.randn(2**12, 2**11).to(DTYPES[kind]), "b": torch.zeros(3, dtype=DTYPES[kind])}
    source = write_folder(tmp_path / "source", tensors)
    small = write_folder(tmp_path / "small", {"w": torch.randn(2, 2)})
    script = [sys.executable, TESTS / "check_soup_memory.py", tmp_path / "soup", tmp_path / "small_soup"]
    done = subprocess.run(
        [*map(str, script), *[str(source)] * 3, str(small)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    tensor_bytes = 2**23 * DTYPES[kind].itemsize
    assert int(done.stdout) <= 2.2 * tensor_bytes, f"{int(done.stdout) / tensor_bytes:.2f} tensors"
