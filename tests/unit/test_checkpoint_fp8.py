"""FP8 checkpoints in soups: dequantised by their blocks' scales, and written without quantisation."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_rl.checkpoint import soup as soup_module
from megatron_rl.checkpoint.soup import soup
from megatron_rl.config import ConfigError, DataError

HELPERS = runpy.run_path(str(Path(__file__).parents[1] / "hf_folders.py"))
write_folder, read_folder = HELPERS["write_folder"], HELPERS["read_folder"]
BLOCK = (4, 8)
FP8 = {"quant_method": "fp8", "weight_block_size": list(BLOCK), "activation_scheme": "dynamic"}


def quantised(rows: int, columns: int, seed: int) -> tuple[Tensor, Tensor]:
    """A weight in E4M3 whose last blocks are not full, and its scales."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator).mul(100).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-rows // BLOCK[0]), -(-columns // BLOCK[1]), generator=generator) / 1000
    return weight, scales


def fp8_folder(folder: Path, *, seed: int, **changes: Any) -> tuple[Path, Tensor]:
    """A checkpoint of one FP8 weight and one bfloat16 norm, and the weight in float32, number by number."""
    weight, scales = quantised(10, 19, seed)
    tensors = {"up.weight": weight, "up.weight_scale_inv": scales, "norm": torch.full((5,), seed + 0.5).bfloat16()}
    write_folder(folder, {**tensors, **changes.pop("tensors", {})}, **{"quantization_config": FP8, **changes})
    exact = torch.empty(weight.shape)
    for row in range(10):
        for column in range(19):
            exact[row, column] = weight[row, column].float() * scales[row // BLOCK[0], column // BLOCK[1]]
    return folder, exact


@pytest.mark.parametrize("piece_numbers", [2**18, 60])
def test_equal_fp8_checkpoints_give_their_numbers_in_bfloat16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece_numbers: int
) -> None:
    """Bit by bit, also where a piece begins inside a block; no scale and no quantisation is left."""
    monkeypatch.setattr(soup_module, "PIECE_NUMBERS", piece_numbers)
    source, exact = fp8_folder(tmp_path / "source", seed=0)
    soup([source] * 3, tmp_path / "soup")
    got = read_folder(tmp_path / "soup")
    assert got.keys() == {"up.weight", "norm"}
    assert got["up.weight"].dtype == torch.bfloat16 and torch.equal(got["up.weight"], exact.bfloat16())
    assert torch.equal(got["norm"], torch.full((5,), 0.5).bfloat16())
    config = json.loads((tmp_path / "soup" / "config.json").read_text())
    assert config == {"model_type": "made_up", "dtype": "bfloat16"}


def test_a_published_block_size_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    weight = torch.randn(256, 384).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 3)
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    source = write_folder(
        tmp_path / "source", {"w": weight, "w_scale_inv": scales}, quantization_config=config, torch_dtype="bfloat16"
    )
    soup([source], tmp_path / "soup")
    expected = Fp8Dequantize(None)._dequantize_one(weight, scales, torch.bfloat16)
    assert torch.equal(read_folder(tmp_path / "soup")["w"], expected)


def test_fp8_and_bfloat16_checkpoints_of_one_model_are_averaged(tmp_path: Path) -> None:
    fp8, exact = fp8_folder(tmp_path / "fp8", seed=1)
    plain = torch.randn(10, 19).bfloat16()
    other = write_folder(tmp_path / "plain", {"up.weight": plain, "norm": torch.zeros(5).bfloat16()})
    soup([other, fp8], tmp_path / "soup", weights=[0.25, 0.75], dtype="float32")
    got = read_folder(tmp_path / "soup")
    expected = 0.25 * plain.double() + 0.75 * exact.double()
    assert (got["up.weight"].double() - expected).abs().max() <= 2 * (exact.double().abs().max() + 3) * 2**-24
    assert torch.equal(got["norm"], torch.full((5,), 0.75 * 1.5))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensors": {"up.weight_scale_inv": torch.ones(2, 3)}}, r"shape \[3, 3\], one for .* got F32 \[2, 3\]"),
        (
            {"tensors": {"up.weight_scale_inv": torch.ones(3, 3, dtype=torch.int8)}},
            r"up.weight must have float scales up.weight_scale_inv .* got I8 \[3, 3\]",
        ),
        (
            {"tensors": {"down.weight": torch.ones(4, 4).to(torch.float8_e4m3fn)}},
            r"down.weight must have float scales down.weight_scale_inv of shape \[1, 1\].* got none",
        ),
        ({"tensors": {"down.weight_scale_inv": torch.ones(1, 1)}}, "down.weight_scale_inv must lie beside an FP8"),
        (
            {"tensors": {"up.weight": torch.ones(10, 1, 19).to(torch.float8_e4m3fn)}},
            r"FP8 weight up.weight must be a matrix, got shape \[10, 1, 19\]",
        ),
        ({"quantization_config": None}, "up.weight must have its block size in config.json"),
    ],
)
def test_weights_without_the_scales_of_their_blocks_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    source, _ = fp8_folder(tmp_path / "source", seed=0, **changes)
    with pytest.raises(DataError, match=message):
        soup([source], tmp_path / "soup")
    assert not (tmp_path / "soup").exists()


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quant_method in .*config.json must be fp8, got 'gptq'"),
        ({"quant_method": "fp8", "weight_block_size": None}, "weight_block_size in .* got None; use weights with"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, r"weight_block_size in .* got \[128, 0\]"),
    ],
)
def test_other_quantisations_are_refused_by_name(tmp_path: Path, quantization: dict[str, Any], message: str) -> None:
    source = write_folder(tmp_path / "source", {"w": torch.ones(2)}, quantization_config=quantization)
    with pytest.raises(ConfigError, match=message):
        soup([source], tmp_path / "soup")
