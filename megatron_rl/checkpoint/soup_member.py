"""A Hugging Face checkpoint as one of several that are averaged: read in pieces, and the same as the others.

Imports no Megatron and no family: any model whose weights are safetensors can be averaged.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import Tensor

from megatron_rl.checkpoint.fp8_weights import (
    QUANTIZATION_KEY,
    check_scales,
    dequantise,
    scale_name,
    weight_block,
)
from megatron_rl.checkpoint.identity import describe_tokenizer
from megatron_rl.checkpoint.safetensors_file import DTYPES, FP8, SafetensorsReader
from megatron_rl.config import ConfigError, DataError
from megatron_rl.model.folder import check_whole_file, read_hf_config, weight_files

FP8_BECOMES = "bfloat16"
_NOT_COMPARED = {
    "_name_or_path",
    "transformers_version",
    "use_cache",
    "dtype",
    "torch_dtype",
    QUANTIZATION_KEY,
}
"""Keys of config.json that do not say which model it is; what the weights are stored as is seen on each tensor."""
_MAX_NAMED = 5
_TORCH_NAMES = {stored: dtype for dtype, stored in DTYPES.items()} | {FP8: FP8_BECOMES}


class Member:
    """One checkpoint open for reading. FP8 weights are dequantised and count as bfloat16; their scales are no tensors.

    ConfigError or DataError for a folder that is damaged or holds something else.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = read_hf_config(folder)
        self._block = weight_block(folder, self.config)
        stored = _stored(folder)
        check_scales(folder, stored, self._block)
        for name, (dtype, _) in stored.items():
            if dtype not in _TORCH_NAMES:
                raise DataError(
                    f"{folder}: weight {name} must be one of {', '.join(_TORCH_NAMES)}, got {dtype}; "
                    "use the model's unquantised weights"
                )
        scales = {scale_name(name) for name, (dtype, _) in stored.items() if dtype == FP8}
        kept = {name: value for name, value in stored.items() if name not in scales}
        self.shapes = {name: shape for name, (_, shape) in kept.items()}
        self.dtypes = {name: _TORCH_NAMES[dtype] for name, (dtype, _) in kept.items()}
        """torch's names."""
        self._fp8 = {name for name, (dtype, _) in kept.items() if dtype == FP8}
        self._reader = SafetensorsReader(sorted(set(weight_files(folder).values())))

    def __enter__(self) -> Self:
        self._reader.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reader.__exit__(kind, error, trace)

    @cached_property
    def main_dtype(self) -> str:
        """The dtype of most numbers."""
        counts = Counter[str]()
        for name, shape in self.shapes.items():
            counts[self.dtypes[name]] += math.prod(shape)
        return counts.most_common(1)[0][0]

    def read(self, name: str, rows: range) -> Tensor:
        """Those rows of a weight as matrix_shape lays it out, in float64. [len(rows), row length]"""
        _, length = matrix_shape(self.shapes[name])
        piece = self._reader.read_piece(name, rows.start * length, rows.stop * length).view(len(rows), length)
        if name not in self._fp8:
            return piece.float().double()  # 16 bits to 64 in two steps take 0.6 times as long
        assert self._block is not None, "an FP8 weight without a block size was refused"
        return dequantise(piece, self._reader.read(scale_name(name)), self._block, first_row=rows.start)


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """(rows, numbers in a row) of a tensor seen as a matrix; a vector has rows of one number."""
    return (math.prod(shape[:-1]), shape[-1]) if len(shape) > 1 else (math.prod(shape), 1)


def open_members(stack: ExitStack, folders: Sequence[Path]) -> list[Member]:
    """The checkpoints, open until the stack closes; ConfigError or DataError unless all of them are of one model."""
    members = [stack.enter_context(Member(folder)) for folder in folders]
    first = members[0]
    for other in members[1:]:
        _check_config(first, other)
        _check_tokenizer(first, other)
        _check_tensors(first, other)
    return members


def _stored(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> (safetensors' dtype, shape) of every tensor; the files are whole and hold what the index names."""
    files = weight_files(folder)
    stored: dict[str, tuple[str, tuple[int, ...]]] = {}
    for file in sorted(set(files.values())):
        stored |= check_whole_file(file)
    if missing := [name for name in files if name and name not in stored]:
        raise DataError(
            f"{folder}: the index names weights that must be in its files, missing: {_listed(missing)}; "
            "download the checkpoint again"
        )
    if not stored:
        raise DataError(f"{folder}: a checkpoint must hold weights, got none; download it again")
    return stored


def _check_config(first: Member, other: Member) -> None:
    different = _different(first.config, other.config, lambda key: key not in _NOT_COMPARED)
    notes = [f"{key} {_shown(first.config, key)} there, {_shown(other.config, key)} here" for key in different]
    if notes:
        raise ConfigError(
            f"{other.folder} must have the config.json of {first.folder}, got {_listed(notes)}; average checkpoints of "
            "one model, or copy the file where the difference is of no matter"
        )


def _check_tokenizer(first: Member, other: Member) -> None:
    if different := _different(describe_tokenizer(first.folder), describe_tokenizer(other.folder)):
        raise ConfigError(
            f"{other.folder} must have the tokenizer of {first.folder}, got other contents of {_listed(different)}; "
            "average checkpoints that were trained with one tokenizer and one chat template, or copy the files"
        )


def _check_tensors(first: Member, other: Member) -> None:
    """Names, then shapes."""
    missing = [f"weight {name} is missing" for name in first.shapes if name not in other.shapes]
    extra = [f"weight {name} has no counterpart" for name in other.shapes if name not in first.shapes]
    misshapen = [
        f"weight {name} has shape {list(other.shapes[name])}, not {list(shape)}"
        for name, shape in first.shapes.items()
        if name in other.shapes and other.shapes[name] != shape
    ]
    if problems := missing + extra + misshapen:
        raise DataError(
            f"{other.folder} must have the weights of {first.folder}, got: {_listed(problems)}; "
            "average checkpoints of one model"
        )


def _different(
    there: Mapping[str, Any], here: Mapping[str, Any], compared: Callable[[str], bool] = lambda key: True
) -> list[str]:
    keys = sorted(filter(compared, there.keys() | here.keys()))
    return [key for key in keys if key not in there or key not in here or there[key] != here[key]]


def _shown(config: Mapping[str, Any], key: str) -> str:
    text = repr(config[key]) if key in config else "nothing"
    return text if len(text) <= 60 else f"{text[:60]}..."


def _listed(names: Sequence[str]) -> str:
    more = f"; and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return "; ".join(names[:_MAX_NAMED]) + more
