"""A model's weights, one layer at a time in memory, between Hugging Face tensors and a torch_dist folder.

The model itself is on the meta device: names and shapes without numbers.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from megatron_rl.checkpoint.pieces import Piece, Region, model_regions
from megatron_rl.checkpoint.torch_dist import PieceReader
from megatron_rl.config import DataError
from megatron_rl.distributed.groups import ParallelGroups
from megatron_rl.model.families.family import WeightPart
from megatron_rl.model.hf_weights import Locator, shard_of
from megatron_rl.model.policy import PolicyModel


class LayerStore:
    """The tensors of one layer of a model on the meta device, real for as long as the layer is current."""

    def __init__(self, model: PolicyModel, groups: ParallelGroups) -> None:
        self._meta = model.global_tensors()
        self._names = {id(tensor): name for name, tensor in self._meta.items()}
        self._groups = groups
        self._real: dict[str, Tensor] = {}
        self._locate = Locator(model, groups, lambda tensor: self._real[self._names[id(tensor)]])
        self._locate_meta = Locator(model, groups, lambda tensor: tensor)
        self._regions: dict[str, list[Region]] = {}
        for region in model_regions(model, groups):
            self._regions.setdefault(model.global_name(region.name), []).append(region)
        self.layers: list[list[WeightPart]] = [
            list(parts) for _, parts in itertools.groupby(model.weight_parts, key=lambda part: part.layer)
        ]
        """HF tensors by layer; what is in no layer comes in groups of its own."""

    def pieces(self, parts: Sequence[WeightPart], resolve: Callable[[str], Tensor] | None = None) -> list[Piece]:
        """Where the tensors that hold the parts are in a checkpoint. resolve: name -> tensor; None: the current one."""
        names = dict.fromkeys(name for part in parts for name, _ in self._locate_meta.held(part))
        whole = resolve or (lambda name: self._real[name])
        return [region.piece(lambda name=name: whole(name)) for name in names for region in self._regions[name]]

    def fill(self, parts: Sequence[WeightPart], read: Callable[[str], Tensor]) -> None:
        """Makes a layer current and fills it from whole HF tensors. DataError when they hold NaN."""
        self._allocate(parts)
        for part in parts:
            shard = shard_of(read(part.name), part, self._groups)
            for _, view in self._locate.held(part):
                view.copy_(shard.reshape(view.shape))
        damaged = [name for name, tensor in self._real.items() if bool(tensor.isnan().any())]
        if damaged:
            raise DataError(f"weights must be numbers, got NaN in the HF tensors of {damaged}; use undamaged weights")

    def load(self, parts: Sequence[WeightPart], reader: PieceReader) -> None:
        """Makes a layer current and fills it from a checkpoint."""
        self._allocate(parts)
        reader.read(self.pieces(parts))

    def hf_tensor(self, part: WeightPart) -> Tensor:
        """A copy of a part of the current layer, which may outlive it; the model must be whole on this rank."""
        _, view = self._locate.held(part)[0]
        return view.reshape(part.shape).clone()

    def current(self, name: str) -> Tensor | None:
        """A tensor of the current layer."""
        return self._real.get(name)

    def _allocate(self, parts: Sequence[WeightPart]) -> None:
        self._real = {}  # first, so that two layers are never there at once
        names = dict.fromkeys(name for part in parts for name, _ in self._locate_meta.held(part))
        self._real = {
            name: torch.full(self._meta[name].shape, float("nan"), dtype=self._meta[name].dtype) for name in names
        }


def pieces_of_hf(
    model: PolicyModel, groups: ParallelGroups, read: Callable[[str], Tensor], *, share: int, num_shares: int
) -> list[Piece]:
    """What a checkpoint of the HF tensors consists of, resolved layer by layer in the order given.

    The layers are dealt out to num_shares; the pieces are those of share. The model is on the meta device and whole.
    """
    store = LayerStore(model, groups)
    pieces = []
    for parts in store.layers[share::num_shares]:

        def resolve(name: str, parts: list[WeightPart] = parts) -> Tensor:
            tensor = store.current(name)
            if tensor is None:
                store.fill(parts, read)
                tensor = store.current(name)
            assert tensor is not None, f"{name} belongs to its layer"
            return tensor

        pieces += store.pieces(parts, resolve)
    return pieces


def hf_of_checkpoint(
    model: PolicyModel, groups: ParallelGroups, folder: Path, names: Sequence[str]
) -> Iterator[tuple[str, Tensor]]:
    """The named HF tensors of a checkpoint, whole, in layout order. The model is on the meta device and whole.

    DataError before the first one when any tensor of the model is missing, misshapen or incomplete.
    """
    store, reader, wanted = LayerStore(model, groups), PieceReader(folder), set(names)
    reader.check([piece for parts in store.layers for piece in store.pieces(parts)])
    for layer in store.layers:
        parts = [part for part in layer if part.name in wanted]
        if parts:
            store.load(parts, reader)
            yield from ((part.name, store.hf_tensor(part)) for part in parts)
