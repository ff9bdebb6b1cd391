"""Engine side, without the engine: an arena, what must lie in it, and when it may become the weights.

Invariants: nothing is loaded before every tensor of the version is there with its checksum; a load that fails is undone
before the error is reported; the half that holds the served version is never the one that is written next.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from megatron_rl.records import TensorSlot, WeightManifest
from megatron_rl.weight_sync.checksum import checksum
from megatron_rl.weight_sync.errors import WeightsLostError, WeightSyncError
from megatron_rl.weight_sync.plan import arena_nbytes, torch_dtype
from megatron_rl.weight_sync.transport import Arena

Shapes = Mapping[str, tuple[int, ...]]
_NAMED = 5
"""Names listed in an error before "and N more"."""


class WeightReceiver:
    """One arena and the version it serves. previous: the receiver that it replaces, which holds what is served now."""

    def __init__(self, slots: Sequence[TensorSlot], arena: Arena, previous: "WeightReceiver | None" = None) -> None:
        if len(arena.halves[0]) < arena_nbytes(slots):
            raise ValueError(f"the arena must hold {arena_nbytes(slots)} bytes, got {len(arena.halves[0])}")
        self.arena = arena
        self.version: int | None = previous.version if previous else None
        """Version that was loaded last; None before the first."""
        self._served: int | None = None
        self._previous = previous
        self._slots = {slot.name: slot for slot in slots}

    def commit(
        self,
        manifest: WeightManifest,
        *,
        load: Callable[[Iterable[tuple[str, Tensor]]], None],
        reload_initial: Callable[[], None],
    ) -> None:
        """Verifies, then loads. WeightSyncError: the weights are those of before. WeightsLostError: they are not.

        load takes every (name, tensor) of a version; reload_initial brings back what the engine started with.
        """
        self.verify(manifest)
        try:
            load(self.tensors(manifest.buffer_index))
        except Exception as error:
            self._go_back(load, reload_initial, error)
            raise WeightSyncError(
                f"loading weights of version {manifest.version} failed with {type(error).__name__}: {error}; "
                f"the engine went back to {self._serving()}"
            ) from error
        self.version, self._served, self._previous = manifest.version, manifest.buffer_index, None

    def verify(self, manifest: WeightManifest) -> None:
        """WeightSyncError naming what is missing, unknown or damaged; nothing has been touched then."""
        where = f"version {manifest.version} was refused and the engine still serves {self._serving()}"
        if not 0 <= manifest.buffer_index < len(self.arena.halves):
            raise WeightSyncError(f"{where}: the arena has 2 halves, got buffer_index {manifest.buffer_index}")
        if manifest.buffer_index == self._served:
            raise WeightSyncError(f"{where}: half {self._served} holds the served version and must not be written")
        for what, names in (
            ("without a checksum", self._slots.keys() - manifest.checksums.keys()),
            ("not in the layout", manifest.checksums.keys() - self._slots.keys()),
        ):
            if names:
                raise WeightSyncError(f"{where}: tensors {what}: {_some(names)}")
        damaged = [
            name for name, tensor in self.tensors(manifest.buffer_index) if checksum(tensor) != manifest.checksums[name]
        ]
        if damaged:
            raise WeightSyncError(f"{where}: bytes do not match their checksum in {_some(damaged)}")

    def tensors(self, buffer_index: int) -> Iterator[tuple[str, Tensor]]:
        """Views into one half, in the order of the layout."""
        half = self.arena.halves[buffer_index]
        for slot in self._slots.values():
            flat = half[slot.offset : slot.offset + slot.nbytes].view(torch_dtype(slot.dtype))
            yield slot.name, flat.view(slot.shape)

    def _go_back(
        self,
        load: Callable[[Iterable[tuple[str, Tensor]]], None],
        reload_initial: Callable[[], None],
        cause: Exception,
    ) -> None:
        try:
            served = self._served_tensors()
            if served is None:
                reload_initial()
            else:
                load(served)
        except Exception as error:
            raise WeightsLostError(
                f"loading new weights failed ({cause}) and so did going back to {self._serving()} ({error})"
            ) from error

    def _served_tensors(self) -> Iterator[tuple[str, Tensor]] | None:
        if self._served is not None:
            return self.tensors(self._served)
        return self._previous._served_tensors() if self._previous else None

    def _serving(self) -> str:
        return "the checkpoint it started from" if self.version is None else f"version {self.version}"


def check_slots(slots: Sequence[TensorSlot], expected: Shapes, *, tied: bool) -> None:
    """WeightSyncError if the layout is not exactly the tensors of the engine's checkpoint.

    tied: the model reads its output head from the embedding, so lm_head.weight may be in either, or in none.
    """
    got = {slot.name: tuple(slot.shape) for slot in slots}
    optional = {"lm_head.weight"} if tied else set()
    for what, names in (
        ("the engine's model needs", expected.keys() - got.keys() - optional),
        ("the engine's model does not have", got.keys() - expected.keys() - optional),
    ):
        if names:
            raise WeightSyncError(f"tensors that {what}: {_some(names)}; trainer and engine must load the same model")
    wrong = [name for name in got.keys() & expected.keys() if got[name] != expected[name]]
    if wrong:
        name = min(wrong)
        raise WeightSyncError(
            f"tensors with another shape than in the engine's model: {_some(wrong)}; "
            f"{name} is {list(got[name])}, the engine has {list(expected[name])}"
        )


def checkpoint_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of an HF folder, from the headers of its safetensors files."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    else:
        files = ["model.safetensors"]
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        with safe_open(folder / file, framework="pt") as tensors:
            shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    return shapes


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - _NAMED} more" if len(ordered) > _NAMED else ""
    return ", ".join(ordered[:_NAMED]) + more
