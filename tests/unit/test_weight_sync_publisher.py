"""The trainer's side with scripted engines and a scripted wire: who is asked what, and what an error leaves behind."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_rl.records import TensorSlot, WeightManifest
from megatron_rl.weight_sync.checksum import checksum
from megatron_rl.weight_sync.errors import WeightSyncError
from megatron_rl.weight_sync.plan import arena_nbytes
from megatron_rl.weight_sync.publisher import Publisher, WeightSyncConfig
from megatron_rl.weight_sync.receiver import WeightReceiver
from megatron_rl.weight_sync.transport import ArenaAddress, Piece, TransportError

SPECS = [
    TensorSlot("a", "float32", (3, 2), 0, 0),
    TensorSlot("b", "bfloat16", (7,), 0, 0),
    TensorSlot("empty", "float32", (0,), 0, 0),
]


class PlainArena:
    def __init__(self, nbytes: int) -> None:
        self.halves = [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(2)]

    @property
    def address(self) -> ArenaAddress:
        return ArenaAddress(peer=str(id(self)), metadata="", buffers=[0, 1], nbytes=len(self.halves[0]))

    def close(self) -> None: ...


class Engine:
    """A receiver behind EngineTarget."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.refuses = False
        self.arenas: dict[str, PlainArena] = {}
        self.receiver: WeightReceiver | None = None
        self.weights: dict[str, Tensor] = {}

    def wait_ready(self, timeout_s: float) -> None:
        assert timeout_s > 0

    def open_arena(self, slots: Sequence[TensorSlot], *, ucx_tls: str) -> ArenaAddress:
        arena = PlainArena(arena_nbytes(slots))
        self.arenas[arena.address.peer] = arena
        self.receiver = WeightReceiver(slots, arena, previous=self.receiver)
        return arena.address

    def commit(self, manifest: WeightManifest) -> None:
        if self.refuses:
            raise WeightSyncError(f"engine {self.url} will not")
        assert self.receiver is not None
        self.receiver.commit(manifest, load=self._load, reload_initial=lambda: None)

    def _load(self, weights: Any) -> None:
        self.weights = {name: tensor.clone() for name, tensor in weights}


class Wire:
    """A writer that copies inside this process."""

    def __init__(self, engines: Sequence[Engine], nbytes: int) -> None:
        self.staging = torch.zeros(nbytes, dtype=torch.uint8)
        self.fails = False
        self._engines = engines
        self._arenas: list[PlainArena] = []

    def connect(self, address: ArenaAddress) -> None:
        self._arenas += [engine.arenas[address.peer] for engine in self._engines if address.peer in engine.arenas]

    def write(self, pieces: Sequence[Piece], *, buffer_index: int, timeout_s: float) -> None:
        if self.fails:
            raise TransportError("writing weights to engine-1 failed: cut")
        for arena in self._arenas:
            for piece in pieces:
                source = self.staging[piece.source : piece.source + piece.nbytes]
                arena.halves[buffer_index][piece.target : piece.target + piece.nbytes] = source

    def close(self) -> None: ...


class Trainer:
    """A publisher for two engines, and the weights it exports."""

    def __init__(self) -> None:
        self.engines = [Engine("http://one"), Engine("http://two")]
        self.wires: list[Wire] = []
        self.weights: dict[str, Any] = {}
        self.publisher = Publisher(
            SPECS, self._export, self.engines, config=WeightSyncConfig(), open_writer=self._open_writer
        )

    def _open_writer(self, nbytes: int, *, ucx_tls: str) -> Wire:
        self.wires.append(Wire(self.engines, nbytes))
        return self.wires[-1]

    def _export(self, owners: Mapping[str, int]) -> Iterator[tuple[str, Tensor | None]]:
        assert owners == dict.fromkeys((spec.name for spec in SPECS), 0)
        yield from self.weights.items()

    def publish(self, version: int, **changes: Any) -> None:
        self.weights = tensors(version) | changes
        self.publisher.publish(version)


def tensors(version: int) -> dict[str, Tensor]:
    return {spec.name: torch.full(spec.shape, float(version), dtype=getattr(torch, spec.dtype)) for spec in SPECS}


def serves(engine: Engine, version: int) -> bool:
    expected = tensors(version)
    return all(torch.equal(engine.weights[name], expected[name]) for name in expected)


def test_every_engine_gets_every_version() -> None:
    trainer = Trainer()
    for version in range(4):
        trainer.publish(version)
        assert all(serves(engine, version) for engine in trainer.engines)
    assert len(trainer.wires) == 1, "arenas are opened once"


def test_tensor_that_does_not_fit_the_layout_is_named_and_nothing_is_committed() -> None:
    trainer = Trainer()
    trainer.publish(1)
    for changes, message in (
        ({"a": torch.zeros(2, 3)}, r"give a as float32 \[3, 2\], got float32 \[2, 3\]"),
        ({"a": torch.zeros(3, 2).double()}, r"give a as float32 \[3, 2\], got float64"),
        ({"a": None}, "left out 1 tensors of trainer rank 0, as a"),
        ({"c": torch.zeros(1)}, "give c to its owner alone"),
    ):
        with pytest.raises(WeightSyncError, match=message):
            trainer.publish(2, **changes)
        assert all(serves(engine, 1) for engine in trainer.engines)


def test_broken_wire_leaves_old_weights_and_is_never_used_again() -> None:
    trainer = Trainer()
    trainer.publish(1)
    trainer.wires[0].fails = True
    with pytest.raises(WeightSyncError, match=r"version 2 were not published.* trainer rank 0: .*engine-1 failed: cut"):
        trainer.publish(2)
    assert all(serves(engine, 1) for engine in trainer.engines)
    trainer.publish(3)
    assert all(serves(engine, 3) for engine in trainer.engines)
    assert len(trainer.wires) == 2 and all(len(engine.arenas) == 2 for engine in trainer.engines)


def test_engine_that_refuses_is_named_and_the_next_version_reaches_all() -> None:
    trainer = Trainer()
    trainer.publish(1)
    trainer.engines[1].refuses = True
    with pytest.raises(WeightSyncError, match=r"1 of 2 engines did not take version 2: http://two: .*will not"):
        trainer.publish(2)
    assert serves(trainer.engines[0], 2) and serves(trainer.engines[1], 1)
    trainer.engines[1].refuses = False
    trainer.publish(3)
    assert all(serves(engine, 3) for engine in trainer.engines)


def test_checksum_depends_on_every_byte_and_on_nothing_else() -> None:
    tensor = torch.arange(24, dtype=torch.float32).view(2, 3, 4)
    assert checksum(tensor) == checksum(tensor.clone().view(24)) == checksum(tensor.view(torch.uint8))
    other = tensor.clone()
    other[1, 2, 3] = 23.5
    assert checksum(other) != checksum(tensor)
    assert len(checksum(torch.zeros(0))) == 32
