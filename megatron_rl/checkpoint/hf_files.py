"""The files of a Hugging Face folder: weights written tensor by tensor, and what goes along with them."""

import json
import math
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from megatron_rl.checkpoint.safetensors_file import SafetensorsWriter
from megatron_rl.model.folder import INDEX_NAME, SINGLE_NAME
from megatron_rl.model.hf_tensor import HfTensorSpec

MAX_SHARD_BYTES = 4 * 2**30
"""Largest safetensors file; a single larger tensor gets a file of its own."""
COMPANION_PATTERNS = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
)
"""Files of an HF folder that stay valid when only the weights change."""


class HfFiles:
    """Opens a file with its first tensor and closes it with its last; several ranks may write different files."""

    def __init__(self, folder: Path, layout: Sequence[HfTensorSpec]) -> None:
        self._folder, self._layout, self.plan = folder, layout, file_plan(layout)
        self._open: dict[str, SafetensorsWriter] = {}

    def write(self, name: str, tensor: Tensor) -> None:
        """A tensor of the layout, in any order, each once."""
        if self._writer(name).write(name, tensor):
            del self._open[self.plan[name]]

    def write_pieces(self, name: str, pieces: Iterable[Tensor]) -> None:
        """The same for a tensor that comes in pieces, which flattened and end to end are it."""
        if self._writer(name).write_pieces(name, pieces):
            del self._open[self.plan[name]]

    def write_index(self) -> None:
        """Which tensor is in which file, where there are several."""
        if set(self.plan.values()) != {SINGLE_NAME}:
            index = {"metadata": {"total_size": sum(map(_num_bytes, self._layout))}, "weight_map": self.plan}
            (self._folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")

    def _writer(self, name: str) -> SafetensorsWriter:
        file = self.plan[name]
        if file not in self._open:
            specs = [spec for spec in self._layout if self.plan[spec.name] == file]
            self._open[file] = SafetensorsWriter(self._folder / file, specs)
        return self._open[file]


def copy_companions(source: Path, target: Path) -> None:
    """Copies tokenizer, chat template and generation config."""
    for pattern in COMPANION_PATTERNS:
        for file in sorted(source.glob(pattern)):
            if file.is_file():
                shutil.copyfile(file, target / file.name)


def file_plan(layout: Sequence[HfTensorSpec]) -> dict[str, str]:
    """Tensor name -> file name, in layout order, each file at most MAX_SHARD_BYTES."""
    numbers, number, used = {}, 0, 0
    for spec in layout:
        size = _num_bytes(spec)
        if used and used + size > MAX_SHARD_BYTES:
            number, used = number + 1, 0
        numbers[spec.name] = number
        used += size
    if number == 0:
        return dict.fromkeys(numbers, SINGLE_NAME)
    return {name: f"model-{n + 1:05}-of-{number + 1:05}.safetensors" for name, n in numbers.items()}


def _num_bytes(spec: HfTensorSpec) -> int:
    return math.prod(spec.shape) * getattr(torch, spec.dtype).itemsize
