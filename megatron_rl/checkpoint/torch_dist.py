"""torch_dist folders, written and read piece by piece: no rank holds more than one piece beside its own state."""

import dataclasses
import json
import math
import operator
import os
from collections.abc import Iterator, Sequence
from itertools import starmap
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megatron_rl.checkpoint.boxes import Box
from megatron_rl.checkpoint.pieces import Piece
from megatron_rl.checkpoint.tiling import BoxIndex, first_misfit
from megatron_rl.config import DataError

MAX_BYTES = 8 * 2**20
"""Of a stored piece."""
_MEGATRON_FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


def write_pieces(folder: Path, pieces: Sequence[Piece], group: dist.ProcessGroup | None = None) -> None:
    """Writes the pieces of all ranks, in their order, into an existing empty folder. Collective over group, the world
    where None; raises on every rank when one fails. ValueError when they do not fill their tensors exactly once."""
    try:
        state_dict_saver.save(
            {},
            storage_writer=_PieceWriter(folder),
            planner=_PiecePlanner([small for piece in pieces for small in _split(piece)]),
            process_group=group,
        )
    except CheckpointException as error:
        causes = [cause for cause, _ in error.failures.values()]
        raise min(causes, key=lambda cause: not isinstance(cause, OSError)) from error


def _split(piece: Piece) -> Iterator[Piece]:
    """Cuts a piece until each part has at most MAX_BYTES: whoever reads a stored piece holds all of it for a moment."""
    num_bytes = math.prod(piece.sizes) * piece.dtype.itemsize
    axis = next((axis for axis, size in enumerate(piece.sizes) if size > 1), None)
    if num_bytes <= MAX_BYTES or axis is None:
        yield piece
        return
    count = max(1, MAX_BYTES * piece.sizes[axis] // num_bytes)
    for start in range(0, piece.sizes[axis], count):
        sizes = _changed(piece.sizes, axis, min(count, piece.sizes[axis] - start))
        offsets = _changed(piece.offsets, axis, piece.offsets[axis] + start)

        def resolve(start: int = start, length: int = sizes[axis]) -> Tensor:
            return piece.resolve().view(piece.sizes).narrow(axis, start, length)

        yield from _split(dataclasses.replace(piece, offsets=offsets, sizes=sizes, resolve=resolve))


def _changed(shape: tuple[int, ...], axis: int, size: int) -> tuple[int, ...]:
    return (*shape[:axis], size, *shape[axis + 1 :])


class PieceReader:
    """A torch_dist folder open for reading; this process alone."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._reader = folder, FileSystemReader(folder)
        self._metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        self._indexes: dict[str, BoxIndex] = {}

    def check(self, pieces: Sequence[Piece]) -> None:
        """DataError naming what is missing, misshapen or incomplete in the folder."""
        self._plan(pieces)

    def read(self, pieces: Sequence[Piece]) -> None:
        """Fills the pieces in place, after check."""
        with torch.no_grad():
            self._reader.read_data(LoadPlan(self._plan(pieces)), _Destinations(pieces))  # type: ignore[arg-type]

    def _plan(self, pieces: Sequence[Piece]) -> list[ReadItem]:
        items, problems = [], []
        for number, piece in enumerate(pieces):
            stored = self._metadata.state_dict_metadata.get(piece.key)
            if problem := _misfit(piece, stored):
                problems.append(problem)
                continue
            assert isinstance(stored, TensorStorageMetadata)
            if piece.key not in self._indexes:
                self._indexes[piece.key] = BoxIndex([_box(chunk.offsets, chunk.sizes) for chunk in stored.chunks])
            meeting = self._indexes[piece.key].meeting(_box(piece.offsets, piece.sizes))
            found = [_read_item(number, piece, stored.chunks[chunk], chunk) for chunk in meeting]
            if sum(math.prod(item.lengths) for item in found) != math.prod(piece.sizes):
                problems.append(f"{piece.key} is not complete")
            items += found
        if problems:
            more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
            raise DataError(
                f"{self._folder} must hold the state of this model, but {'; '.join(sorted(problems)[:5])}{more}; "
                "use the checkpoint that belongs to the model's config.json"
            )
        return items


def _misfit(piece: Piece, stored: Any) -> str | None:
    if not isinstance(stored, TensorStorageMetadata):
        return f"{piece.key} is missing"
    if tuple(stored.size) != piece.global_shape or stored.properties.dtype != piece.dtype:
        return (
            f"{piece.key} is {stored.properties.dtype} {list(stored.size)} there and {piece.dtype} "
            f"{list(piece.global_shape)} here"
        )
    return None


def _box(offsets: Sequence[int], sizes: Sequence[int]) -> Box:
    return tuple(zip(offsets, sizes, strict=True))


def _read_item(number: int, piece: Piece, stored: ChunkStorageMetadata, chunk: int) -> ReadItem:
    """What the piece of that number takes from the stored chunk, which it meets."""
    starts = list(map(max, piece.offsets, stored.offsets))
    ends = [
        min(mine + size, theirs + length)
        for mine, size, theirs, length in zip(piece.offsets, piece.sizes, stored.offsets, stored.sizes, strict=True)
    ]
    return ReadItem(
        type=LoadItemType.TENSOR,
        dest_index=MetadataIndex(str(number)),
        dest_offsets=torch.Size(map(operator.sub, starts, piece.offsets)),
        storage_index=MetadataIndex(piece.key, stored.offsets, chunk),
        storage_offsets=torch.Size(map(operator.sub, starts, stored.offsets)),
        lengths=torch.Size(map(operator.sub, ends, starts)),
    )


class _Destinations:
    """The two calls of a LoadPlanner by which FileSystemReader hands over what it has read."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces = pieces

    def resolve_tensor(self, item: ReadItem) -> Tensor:
        piece = self._pieces[int(item.dest_index.fqn)]
        target = piece.resolve().view(piece.sizes)
        for axis, (offset, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
            target = target.narrow(axis, offset, length)
        return target

    def commit_tensor(self, item: ReadItem, tensor: Tensor) -> None:
        """Nothing: the tensor was filled in place."""


class _PiecePlanner(SavePlanner):
    """Asks for a piece's numbers only when they are written."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces = {(piece.key, torch.Size(piece.offsets)): piece for piece in pieces}
        assert len(self._pieces) == len(pieces), "a piece is written once"

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """Nothing: the pieces are known."""

    def create_local_plan(self) -> SavePlan:
        return SavePlan([_write_item(piece) for piece in self._pieces.values()])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = create_default_global_save_plan(all_plans)
        if errors := list(filter(None, starmap(_misfill, metadata.state_dict_metadata.items()))):
            raise ValueError(f"pieces must fill their tensors exactly once, got: {'; '.join(errors)[:500]}")
        return plans, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        assert write_item.index.offset is not None, "a piece has a place"
        piece = self._pieces[write_item.index.fqn, write_item.index.offset]
        tensor = piece.resolve().reshape(piece.sizes).cpu()
        # torch.save writes the whole memory that a tensor is a view of.
        return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _misfill(key: str, stored: Any) -> str | None:
    misfit = first_misfit(stored.size, (_box(chunk.offsets, chunk.sizes) for chunk in stored.chunks))
    if misfit is None:
        return None
    element, times = misfit
    return f"element {list(element)} of {key}, which has shape {list(stored.size)}, {times} times"


def _write_item(piece: Piece) -> WriteItem:
    offsets = torch.Size(piece.offsets)
    chunk = ChunkStorageMetadata(offsets, torch.Size(piece.sizes))
    data = TensorWriteData(chunk, TensorProperties(dtype=piece.dtype), torch.Size(piece.global_shape))
    return WriteItem(MetadataIndex(piece.key, offsets), WriteItemType.SHARD, tensor_data=data)


class _PieceWriter(FileSystemWriter):
    """One file per rank, tensor after tensor; torch's own writer keeps every tensor until its file is complete."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        name = f"{plan.storage_data.prefix}0.distcp"
        results = []
        with open(Path(self.path) / name, "wb") as raw:
            stream = _Stream(raw)
            for item in plan.items:
                offset = raw.tell()
                stream.save(cast(Tensor, planner.resolve_data(item)))
                length = raw.tell() - offset
                results.append(WriteResult(item.index, length, _StorageInfo(name, offset, length)))
            raw.flush()
            os.fsync(raw.fileno())
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        # What Megatron's own loader looks for first.
        torch.save({}, Path(self.path) / "common.pt")
        (Path(self.path) / "metadata.json").write_text(json.dumps(_MEGATRON_FORMAT))


class _Stream:
    """A file for torch.save, which reports that a disk is full as a broken archive: the file's own error is kept."""

    def __init__(self, raw: Any) -> None:
        self._raw, self._error = raw, None

    def save(self, tensor: Tensor) -> None:
        try:
            torch.save(tensor, self)  # type: ignore[arg-type]
        except RuntimeError as error:
            raise self._error or error from error

    def write(self, data: Any) -> int:
        try:
            return self._raw.write(data)
        except OSError as error:
            self._error = error
            raise

    def flush(self) -> None:
        self._raw.flush()
