"""The weight files of a Hugging Face folder, written tensor by tensor."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from megatron_rl.checkpoint.safetensors_file import SafetensorsWriter
from megatron_rl.model.folder import INDEX_NAME, SINGLE_NAME
from megatron_rl.model.hf_weights import HfTensorSpec

MAX_SHARD_BYTES = 4 * 2**30
"""Largest safetensors file; a single larger tensor gets a file of its own."""


class HfFiles:
    """Opens a file with its first tensor and closes it with its last; several ranks may write different files."""

    def __init__(self, folder: Path, layout: Sequence[HfTensorSpec]) -> None:
        self._folder, self._layout, self.plan = folder, layout, file_plan(layout)
        self._open: dict[str, SafetensorsWriter] = {}

    def write(self, name: str, tensor: Tensor) -> None:
        """A tensor of the layout, in any order, each once."""
        file = self.plan[name]
        if file not in self._open:
            specs = [spec for spec in self._layout if self.plan[spec.name] == file]
            self._open[file] = SafetensorsWriter(self._folder / file, specs)
        if self._open[file].write(name, tensor):
            del self._open[file]

    def write_index(self) -> None:
        """Which tensor is in which file, where there are several."""
        if set(self.plan.values()) != {SINGLE_NAME}:
            index = {"metadata": {"total_size": sum(map(_num_bytes, self._layout))}, "weight_map": self.plan}
            (self._folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")


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
