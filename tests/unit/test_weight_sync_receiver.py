"""A version becomes the weights whole, or not at all, whatever goes wrong. No engine, no wire: plain memory."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from megatron_rl.records import TensorSlot, WeightManifest
from megatron_rl.weight_sync.checksum import checksum
from megatron_rl.weight_sync.errors import WeightsLostError, WeightSyncError
from megatron_rl.weight_sync.plan import arena_layout, arena_nbytes
from megatron_rl.weight_sync.receiver import WeightReceiver, check_slots, checkpoint_shapes
from megatron_rl.weight_sync.transport import ArenaAddress

SLOTS = arena_layout(
    [
        TensorSlot("bias", "float32", (3,), 0, 0),
        TensorSlot("weight", "bfloat16", (4, 5), 0, 0),
        TensorSlot("scale", "float32", (), 0, 0),
    ]
)


class PlainArena:
    """Memory without a wire."""

    def __init__(self) -> None:
        self.halves = [torch.zeros(arena_nbytes(SLOTS), dtype=torch.uint8) for _ in range(2)]

    @property
    def address(self) -> ArenaAddress:
        raise AssertionError("plain memory has no address on a wire")

    def close(self) -> None: ...


class Model:
    """Copies what it is given, tensor by tensor, and fails at the tensors it is told to."""

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}
        self.fails_at: set[tuple[str, float]] = set()
        """(name, value of its first element)"""
        self.initial_ok = True
        self.reload_initial()

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            if (name, tensor.flatten()[0].item()) in self.fails_at:
                raise RuntimeError(f"cannot take {name}")
            self.weights[name] = tensor.clone()

    def reload_initial(self) -> None:
        if not hasattr(self, "initial_ok") or self.initial_ok:
            self.weights = tensors(-1)
        else:
            raise RuntimeError("the checkpoint is gone")


def tensors(version: int) -> dict[str, Tensor]:
    return {slot.name: torch.full(slot.shape, float(version), dtype=getattr(torch, slot.dtype)) for slot in SLOTS}


def write(receiver: WeightReceiver, version: int, half: int) -> WeightManifest:
    """Version into a half, as a trainer would."""
    sources = tensors(version)
    for name, target in receiver.tensors(half):
        target.copy_(sources[name])
    return WeightManifest(version, half, {name: checksum(tensor) for name, tensor in sources.items()})


def commit(receiver: WeightReceiver, manifest: WeightManifest, model: Model) -> None:
    receiver.commit(manifest, load=model.load, reload_initial=model.reload_initial)


def holds(model: Model, version: int) -> bool:
    expected = tensors(version)
    return model.weights.keys() == expected.keys() and all(torch.equal(model.weights[n], expected[n]) for n in expected)


def test_versions_alternate_between_the_halves() -> None:
    receiver, model = WeightReceiver(SLOTS, PlainArena()), Model()
    for version in range(1, 5):
        commit(receiver, write(receiver, version, version % 2), model)
        assert holds(model, version) and receiver.version == version


@given(st.sampled_from(SLOTS), st.data())
def test_any_damaged_byte_is_found_and_its_tensor_named(slot: TensorSlot, data: st.DataObject) -> None:
    receiver, model = WeightReceiver(SLOTS, PlainArena()), Model()
    commit(receiver, write(receiver, 1, 0), model)
    manifest = write(receiver, 2, 1)
    at = slot.offset + data.draw(st.integers(0, slot.nbytes - 1))
    receiver.arena.halves[1][at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(
        WeightSyncError, match=rf"version 2 was refused .* still serves version 1.*checksum in {slot.name}"
    ):
        commit(receiver, manifest, model)
    assert holds(model, 1) and receiver.version == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: WeightManifest(2, 1, {k: v for k, v in m.checksums.items() if k != "bias"}), "checksum: bias"),
        (lambda m: WeightManifest(2, 1, {**m.checksums, "extra": "00"}), "not in the layout: extra"),
        (lambda m: WeightManifest(2, 0, m.checksums), "half 0 holds the served version"),
        (lambda m: WeightManifest(2, 2, m.checksums), "2 halves, got buffer_index 2"),
    ],
)
def test_manifest_that_does_not_fit_is_refused_before_anything_is_loaded(change: Any, message: str) -> None:
    receiver, model = WeightReceiver(SLOTS, PlainArena()), Model()
    commit(receiver, write(receiver, 1, 0), model)
    manifest = write(receiver, 2, 1)
    with pytest.raises(WeightSyncError, match=message):
        commit(receiver, change(manifest), model)
    assert holds(model, 1)


@pytest.mark.parametrize("earlier", [0, 1, 2])
def test_load_that_fails_half_way_brings_back_what_was_served(earlier: int) -> None:
    receiver, model = WeightReceiver(SLOTS, PlainArena()), Model()
    for version in range(1, earlier + 1):
        commit(receiver, write(receiver, version, version % 2), model)
    model.fails_at = {("weight", 9.0)}
    serving = f"version {earlier}" if earlier else "the checkpoint it started from"
    with pytest.raises(WeightSyncError, match=rf"cannot take weight; the engine went back to {serving}"):
        commit(receiver, write(receiver, 9, (earlier + 1) % 2), model)
    assert holds(model, earlier or -1)


def test_fresh_arena_still_knows_what_the_old_one_served() -> None:
    old, model = WeightReceiver(SLOTS, PlainArena()), Model()
    commit(old, write(old, 1, 0), model)
    fresh = WeightReceiver(SLOTS, PlainArena(), previous=old)
    model.fails_at = {("weight", 2.0)}
    with pytest.raises(WeightSyncError, match="went back to version 1"):
        commit(fresh, write(fresh, 2, 0), model)
    assert holds(model, 1)
    commit(fresh, write(fresh, 3, 0), model)
    assert holds(model, 3)


def test_weights_that_cannot_be_brought_back_are_called_lost() -> None:
    receiver, model = WeightReceiver(SLOTS, PlainArena()), Model()
    model.fails_at, model.initial_ok = {("scale", 1.0)}, False
    with pytest.raises(WeightsLostError, match="the checkpoint is gone"):
        commit(receiver, write(receiver, 1, 0), model)


def test_layout_must_be_the_checkpoint_and_a_tied_head_may_be_in_either(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2, 3), "b": torch.zeros(4)}, tmp_path / "model.safetensors")
    shapes = checkpoint_shapes(tmp_path)
    assert shapes == {"a": (2, 3), "b": (4,)}
    fitting = [TensorSlot("a", "float32", (2, 3), 0, 24), TensorSlot("b", "float32", (4,), 64, 16)]
    head = TensorSlot("lm_head.weight", "float32", (2, 3), 128, 24)
    check_slots(fitting, shapes, tied=False)
    check_slots([*fitting, head], shapes, tied=True)
    check_slots(fitting, {**shapes, "lm_head.weight": (2, 3)}, tied=True)
    for slots, message in (
        (fitting[:1], "needs: b"),
        ([*fitting, head], r"does not have: lm_head\.weight"),
        ([fitting[0], TensorSlot("b", "float32", (5,), 64, 20)], r"b is \[5\], the engine has \[4\]"),
    ):
        with pytest.raises(WeightSyncError, match=message):
            check_slots(slots, shapes, tied=False)
