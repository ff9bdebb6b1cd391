"""safetensors files, tensor by tensor: a header of JSON, then the tensors' bytes. The layout is that of the library.

https://github.com/huggingface/safetensors#format; the library itself reads and writes a file as a whole.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import torch
from torch import Tensor

from megatron_rl.config import DataError
from megatron_rl.model.hf_tensor import HfTensorSpec

DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_TORCH_DTYPES = {name: getattr(torch, dtype) for dtype, name in DTYPES.items()}
FP8 = "F8_E4M3"
"""Of quantised weights, which mean something only with their scales: read piece by piece, never as a model's tensor."""
_ALIGNMENT = 8


class SafetensorsWriter:
    """One file whose tensors are known beforehand and come in any order, each of them once."""

    def __init__(self, path: Path, specs: Sequence[HfTensorSpec]) -> None:
        # The library puts wide types first, so that every tensor is aligned, and sorts by name within a type.
        ordered = sorted(specs, key=lambda spec: (-getattr(torch, spec.dtype).itemsize, spec.name))
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._specs = {spec.name: spec for spec in ordered}
        self._offsets, end = {}, 0
        for spec in ordered:
            start, end = end, end + math.prod(spec.shape) * getattr(torch, spec.dtype).itemsize
            header[spec.name] = {
                "dtype": DTYPES[spec.dtype],
                "shape": list(spec.shape),
                "data_offsets": [start, end],
            }
            self._offsets[spec.name] = start
        data = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        data += b" " * (-len(data) % _ALIGNMENT)
        self._start = 8 + len(data)
        self._file: IO[bytes] = path.open("wb")
        self._file.write(len(data).to_bytes(8, "little") + data)

    def write(self, name: str, tensor: Tensor) -> bool:
        """Writes a tensor of the dtype and shape it was announced with; True when the file is complete, and closed."""
        assert tuple(tensor.shape) == tuple(self._specs[name].shape), self._specs[name]
        return self.write_pieces(name, [tensor])

    def write_pieces(self, name: str, pieces: Iterable[Tensor]) -> bool:
        """The same for a tensor that comes in pieces, which flattened and end to end are it."""
        spec = self._specs.pop(name)
        self._file.seek(self._start + self._offsets[name])
        num_written = 0
        for piece in pieces:
            assert str(piece.dtype) == f"torch.{spec.dtype}", (spec, piece.dtype)
            self._file.write(_bytes(piece.detach().cpu().contiguous()))
            num_written += piece.numel()
        assert num_written == math.prod(spec.shape), (spec, num_written)
        if not self._specs:
            self._file.close()
        return not self._specs


class SafetensorsReader:
    """Files of one model open for reading; a tensor is in memory only while its reader holds it."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._files = [path.open("rb") for path in paths]
        self._places: dict[str, tuple[IO[bytes], int, Mapping[str, Any]]] = {}
        for file in self._files:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
            for name, entry in header.items():
                if name != "__metadata__":
                    self._places[name] = file, 8 + length + entry["data_offsets"][0], entry

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files:
            file.close()

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of every tensor there is."""
        return {name: tuple(entry["shape"]) for name, (_, _, entry) in self._places.items()}

    @property
    def dtypes(self) -> dict[str, str]:
        """safetensors' name for the dtype of every tensor there is."""
        return {name: entry["dtype"] for name, (_, _, entry) in self._places.items()}

    def read(self, name: str) -> Tensor:
        """The whole tensor, in memory of its own. DataError for a dtype that is no model's here."""
        _, _, entry = self._places[name]
        if entry["dtype"] not in _TORCH_DTYPES:
            raise DataError(
                f"weight {name} must be one of {sorted(_TORCH_DTYPES)}, got {entry['dtype']}; use unquantised weights"
            )
        return self.read_piece(name, 0, math.prod(entry["shape"])).view(entry["shape"])

    def read_piece(self, name: str, start: int, stop: int) -> Tensor:
        """Numbers start to stop of the flattened tensor, as they are stored: also FP8. [stop - start]"""
        file, offset, entry = self._places[name]
        dtype = torch.float8_e4m3fn if entry["dtype"] == FP8 else _TORCH_DTYPES[entry["dtype"]]
        piece = torch.empty(stop - start, dtype=dtype)
        file.seek(offset + start * dtype.itemsize)
        file.readinto(_bytes(piece))  # type: ignore[attr-defined]
        return piece


def _bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data
