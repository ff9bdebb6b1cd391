"""Trainer side: one new weight version into every engine, or into none that fails, with the reason.

Invariants: every rank makes the same collective calls whatever goes wrong, and all of them raise the same error; an
engine is asked to commit only after every rank has written to it and every checksum is known; after an error on the
wire its staging memory and its arena are never used again.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from megatron_rl.records import TensorSlot, WeightManifest
from megatron_rl.weight_sync.checksum import checksum
from megatron_rl.weight_sync.config import WeightSyncConfig
from megatron_rl.weight_sync.errors import WeightSyncError
from megatron_rl.weight_sync.nixl import NixlWriter
from megatron_rl.weight_sync.plan import TensorSpec, arena_layout, arena_nbytes, assign_owners, torch_dtype
from megatron_rl.weight_sync.transport import ArenaAddress, ArenaWriter, Piece, TransportError

__all__ = ["EngineTarget", "PublishReport", "Publisher", "WeightSyncConfig"]

Export = Callable[[dict[str, int]], Iterator[tuple[str, Tensor | None]]]
"""owners (name -> rank) -> (name, tensor on its owner, None elsewhere) in the order of the layout; collective."""


class EngineTarget(Protocol):
    """What publishing needs of an engine; every method raises with the engine's URL in the message."""

    url: str

    def wait_ready(self, timeout_s: float) -> None:
        """Returns when the engine answers."""
        ...

    def open_arena(self, slots: Sequence[TensorSlot], *, ucx_tls: str) -> ArenaAddress:
        """A fresh arena for this layout."""
        ...

    def commit(self, manifest: WeightManifest) -> None:
        """Pauses, verifies, loads, resumes. After an error the engine serves what it served before."""
        ...


@dataclass(frozen=True)
class PublishReport:
    """What one publish cost on this rank."""

    version: int
    nbytes: int
    """Of the whole model, per engine."""
    export_s: float
    """Gathering this rank's tensors into staging memory, checksums included."""
    write_s: float
    """On the wire."""
    commit_s: float
    """Pause, verify, load, resume; engines at the same time. As seen by rank 0, elsewhere including its wait."""


class Publisher:
    """Collective over the ranks of group (default: the whole world, or this process alone without a world).

    targets are read on rank 0 of the group only; other ranks may pass none.
    """

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        export: Export,
        targets: Sequence[EngineTarget],
        *,
        config: WeightSyncConfig,
        group: dist.ProcessGroup | None = None,
        open_writer: Callable[..., ArenaWriter] = NixlWriter,
    ) -> None:
        self._ranks = _Ranks(group)
        self._slots = arena_layout(specs)
        self._owners = assign_owners(self._slots, self._ranks.members)
        self._export, self._targets, self._config, self._open_writer = export, list(targets), config, open_writer
        mine = [slot for slot in self._slots if self._owners[slot.name] == self._ranks.rank]
        self._staged = {slot.name: slot for slot in arena_layout(mine)}
        self._pieces = [Piece(self._staged[slot.name].offset, slot.offset, slot.nbytes) for slot in mine if slot.nbytes]
        self._writer: ArenaWriter | None = None
        self._given_up: list[ArenaWriter] = []
        self._buffer_index = 0

    def publish(self, version: int) -> PublishReport:
        """This version into every engine. WeightSyncError on every rank if any engine did not take it."""
        writer = self._writer or self._connect()
        started = time.monotonic()
        checksums, error = self._stage(writer)
        staged = time.monotonic()
        if not error:
            error = self._write(writer)
        written = time.monotonic()
        gathered = self._ranks.gather((checksums, error))
        outcome = self._ranks.broadcast(self._commit(version, gathered) if gathered is not None else "")
        if outcome:
            self._given_up.append(writer)
            self._writer = None
            raise WeightSyncError(outcome)
        self._buffer_index = 1 - self._buffer_index
        return PublishReport(
            version=version,
            nbytes=sum(slot.nbytes for slot in self._slots),
            export_s=staged - started,
            write_s=written - staged,
            commit_s=time.monotonic() - written,
        )

    def close(self) -> None:
        """Ends the connections; engines keep serving."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _connect(self) -> ArenaWriter:
        """Opens an arena in every engine and connects this rank to all of them."""
        addresses, error = [], ""
        if self._ranks.is_first:
            try:
                addresses = self._open_arenas()
            except Exception as failure:
                error = f"{type(failure).__name__}: {failure}"
        addresses, error = self._ranks.broadcast((addresses, error))
        if error:
            raise WeightSyncError(error)
        writer = self._open_writer(arena_nbytes(list(self._staged.values())), ucx_tls=self._config.ucx_tls)
        try:
            for address in addresses:
                writer.connect(address)
        except TransportError as failure:
            error = f"trainer rank {self._ranks.rank}: {failure}"
        errors = self._ranks.gather(error)
        error = self._ranks.broadcast("; ".join(filter(None, errors)) if errors is not None else "")
        if error:
            self._given_up.append(writer)
            raise WeightSyncError(error)
        self._writer, self._buffer_index = writer, 0
        return writer

    def _open_arenas(self) -> list[ArenaAddress]:
        addresses = []
        for target in self._targets:
            target.wait_ready(self._config.connect_timeout_s)
            addresses.append(target.open_arena(self._slots, ucx_tls=self._config.ucx_tls))
        return addresses

    def _stage(self, writer: ArenaWriter) -> tuple[dict[str, str], str]:
        """(checksums of this rank's tensors, first error). Runs the export to its end in any case: it is collective."""
        checksums: dict[str, str] = {}
        error = ""
        for name, tensor in self._export(self._owners):
            if tensor is None or error:
                continue
            slot = self._staged.get(name)
            if slot is None:
                error = f"the export must give {name} to its owner alone, got it on trainer rank {self._ranks.rank}"
            elif tuple(tensor.shape) != slot.shape or tensor.dtype != torch_dtype(slot.dtype):
                error = (
                    f"the export must give {name} as {slot.dtype} {list(slot.shape)}, "
                    f"got {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
                )
            else:
                view = writer.staging[slot.offset : slot.offset + slot.nbytes].view(tensor.dtype).view(slot.shape)
                view.copy_(tensor.detach())
                checksums[name] = checksum(view)
        missing = self._staged.keys() - checksums.keys()
        if missing and not error:
            error = f"the export left out {len(missing)} tensors of trainer rank {self._ranks.rank}, as {min(missing)}"
        return checksums, error

    def _write(self, writer: ArenaWriter) -> str:
        try:
            writer.write(self._pieces, buffer_index=self._buffer_index, timeout_s=self._config.transfer_timeout_s)
        except TransportError as failure:
            return f"trainer rank {self._ranks.rank}: {failure}"
        return ""

    def _commit(self, version: int, gathered: Sequence[tuple[dict[str, str], str]]) -> str:
        """Rank 0: what went wrong on any rank or in any engine, "" if nothing."""
        errors = [error for _, error in gathered if error]
        if errors:
            return f"weights of version {version} were not published, engines still serve the one before: {errors[0]}"
        checksums = {name: digest for part, _ in gathered for name, digest in part.items()}
        manifest = WeightManifest(version, self._buffer_index, checksums)
        with ThreadPoolExecutor(max_workers=max(1, len(self._targets))) as pool:
            results = [(target, pool.submit(target.commit, manifest)) for target in self._targets]
        failed = [f"{target.url}: {error}" for target, result in results if (error := result.exception())]
        if not failed:
            return ""
        return f"{len(failed)} of {len(results)} engines did not take version {version}: " + "; ".join(failed)


class _Ranks:
    """The few collectives on small objects that publishing needs; a lone process needs no process group."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._alone = group is None and not dist.is_initialized()
        self.members: list[int] = [0] if self._alone else dist.get_process_group_ranks(group or dist.group.WORLD)
        self.rank = 0 if self._alone else dist.get_rank()
        """Global."""
        self.is_first = self.rank == self.members[0]

    def broadcast(self, value: Any) -> Any:
        """The first rank's value."""
        if self._alone:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=self.members[0], group=self._group)
        return values[0]

    def gather(self, value: Any) -> list[Any] | None:
        """Every rank's value on the first rank, None elsewhere."""
        if self._alone:
            return [value]
        values: list[Any] | None = [None] * len(self.members) if self.is_first else None
        dist.gather_object(value, values, dst=self.members[0], group=self._group)
        return values
