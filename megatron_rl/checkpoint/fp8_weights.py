"""Weights in 8 bits with a scale for every block, as DeepSeek-V3 publishes them and vLLM loads them, back to numbers.

A weight of dtype E4M3 has a neighbour, its name and `_scale_inv`, with one number per block: weight = stored * scale.
config.json says how large a block is: quantization_config.weight_block_size. Imports no Megatron.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rl.checkpoint.safetensors_file import DTYPES, FP8
from megatron_rl.config import ConfigError, DataError

QUANTIZATION_KEY = "quantization_config"
_SCALE_SUFFIX = "_scale_inv"
Block = tuple[int, int]
Stored = Mapping[str, tuple[str, tuple[int, ...]]]
"""Tensor name -> (safetensors' dtype, shape)."""


def scale_name(weight: str) -> str:
    """Name of the tensor with a weight's scales."""
    return weight + _SCALE_SUFFIX


def weight_block(folder: Path, hf_config: Mapping[str, Any]) -> Block | None:
    """Rows and columns of a block; None where nothing is quantised. ConfigError for any other quantisation."""
    quantization = hf_config.get(QUANTIZATION_KEY)
    if quantization is None:
        return None
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    if method != "fp8":
        raise ConfigError(
            f"{QUANTIZATION_KEY}.quant_method in {folder / 'config.json'} must be fp8, got {method!r}; "
            "use the model's unquantised weights"
        )
    block = quantization.get("weight_block_size")
    if not (isinstance(block, list) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)):
        raise ConfigError(
            f"{QUANTIZATION_KEY}.weight_block_size in {folder / 'config.json'} must be two numbers of at least 1, got "
            f"{block!r}; use weights with a scale for every block, such as [128, 128], or unquantised ones"
        )
    return block[0], block[1]


def check_scales(folder: Path, stored: Stored, block: Block | None) -> None:
    """DataError unless every FP8 weight, and nothing else, has the scales that its blocks need."""
    for name, (dtype, shape) in stored.items():
        if dtype == FP8:
            _check_scale(folder, name, shape, stored.get(scale_name(name)), block)
        elif name.endswith(_SCALE_SUFFIX) and stored.get(name.removesuffix(_SCALE_SUFFIX), ("", ()))[0] != FP8:
            raise DataError(f"{folder}: {name} must lie beside an FP8 weight, got none; download the checkpoint again")


def _check_scale(
    folder: Path, name: str, shape: tuple[int, ...], scale: tuple[str, tuple[int, ...]] | None, block: Block | None
) -> None:
    if block is None:
        raise DataError(
            f"{folder}: FP8 weight {name} must have its block size in config.json, got no {QUANTIZATION_KEY}; "
            "restore the original config.json"
        )
    if len(shape) != 2:
        raise DataError(
            f"{folder}: FP8 weight {name} must be a matrix, got shape {list(shape)}; use unquantised weights"
        )
    expected = tuple(-(-size // side) for size, side in zip(shape, block, strict=True))
    if scale is None or scale[1] != expected or scale[0] not in DTYPES.values():
        got = "none" if scale is None else f"{scale[0]} {list(scale[1])}"
        raise DataError(
            f"{folder}: FP8 weight {name} must have float scales {scale_name(name)} of shape {list(expected)}, one for "
            f"every block of {list(block)}, got {got}; download the checkpoint again"
        )


def dequantise(weight: Tensor, scales: Tensor, block: Block, *, first_row: int) -> Tensor:
    """Rows first_row onwards of a weight, in float64, where every product of the two is exact.

    weight: those rows as they are stored. scales: of the whole weight, one number per block.
    """
    num_rows, num_columns = weight.shape
    block_rows = torch.arange(first_row, first_row + num_rows) // block[0]
    by_row = scales.double()[block_rows]
    return weight.double().mul_(by_row.repeat_interleave(block[1], dim=1)[:, :num_columns])
