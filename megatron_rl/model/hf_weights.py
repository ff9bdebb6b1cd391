"""The model's weights under their Hugging Face names, one tensor at a time, whatever the parallel layout."""

from collections.abc import Callable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.config import DataError
from megatron_rl.distributed.groups import ParallelGroups, Place
from megatron_rl.model.families.family import WeightPart
from megatron_rl.model.folder import check_tensors, misshapen
from megatron_rl.model.hf_tensor import HfTensorSpec
from megatron_rl.model.policy import PolicyModel
from megatron_rl.model.stages import stage_of

Select = Callable[[Tensor], Tensor]
Shape = tuple[int, ...]


def hf_layout(model: PolicyModel, groups: ParallelGroups) -> list[HfTensorSpec]:
    """Every HF tensor of the whole model, sorted by name; identical on every rank of groups."""
    return [HfTensorSpec(part.name, _dtype_name(part, model), part.shape) for part in model.weight_parts]


def export_hf(
    model: PolicyModel,
    groups: ParallelGroups,
    *,
    owners: Mapping[str, int] | None = None,
    select: Select = lambda parameter: parameter,
) -> Iterator[tuple[str, Tensor | None]]:
    """Walks the HF tensors in layout order; each is whole on its owner, None elsewhere. Collective.

    Every rank must take every item. owners: HF name -> global rank, rank 0 where not named. A tensor may share memory
    with a parameter: copy it before the next optimizer step. select replaces a parameter or buffer by a tensor of its
    shape.
    """
    locate = Locator(model, groups, select)
    for part in model.weight_parts:
        owner = 0 if owners is None else owners.get(part.name, 0)
        yield part.name, _join(part, locate, groups, owner)


def export_gradients(model: PolicyModel, groups: ParallelGroups) -> Iterator[tuple[str, Tensor | None]]:
    """export_hf for main_grad of every parameter, after all reductions but before the optimizer shards them."""
    locate = Locator(model, groups, lambda parameter: parameter.main_grad)  # type: ignore[attr-defined]
    for part in model.weight_parts:
        if part.dtype is None:
            yield part.name, _join(part, locate, groups, 0)


def held_gradients(model: PolicyModel, groups: ParallelGroups) -> Iterator[tuple[str, Tensor]]:
    """(HF name, view of this rank's shard of main_grad) of every HF tensor that this rank trains. No communication."""
    locate = Locator(model, groups, lambda parameter: parameter.main_grad)  # type: ignore[attr-defined]
    for part in model.weight_parts:
        if part.dtype is None:
            yield from ((part.name, grad) for _, grad in locate.held(part))


def import_hf(
    model: PolicyModel,
    groups: ParallelGroups,
    read: Callable[[str], Tensor],
    *,
    available: Mapping[str, Shape] | None = None,
) -> None:
    """Fills every parameter from the HF tensors that read(name) returns whole; a rank reads only what it holds.

    available: name -> shape of all tensors there are. DataError lists what is missing, extra or misshapen before
    anything is read. Values are converted to the model's dtype. NaN marks what was never written, so weights that
    hold NaN are refused as well.
    """
    if available is not None:
        check_available(model, available)
    locate = Locator(model, groups, lambda parameter: parameter)
    written = dict.fromkeys(locate.tensors, 0)
    with torch.no_grad():
        for tensor in locate.tensors.values():
            tensor.fill_(float("nan"))
        for part in model.weight_parts:
            held = locate.held(part)
            if not held:
                continue
            tensor = read(part.name)
            if tuple(tensor.shape) != part.shape:
                raise DataError(misshapen(part.name, tuple(tensor.shape), part.shape))
            shard = shard_of(tensor, part, groups)
            for name, view in held:
                view.copy_(shard.reshape(view.shape))
                written[name] += view.numel()
    _check_written(locate.tensors, written)


def shard_of(tensor: Tensor, part: WeightPart, groups: ParallelGroups) -> Tensor:
    """This rank's shard of a whole HF tensor."""
    if part.split == "whole":
        return tensor
    ways, index = _ways(part, groups, groups.place)
    return tensor.chunk(ways, dim=0 if part.split == "rows" else 1)[index]


class Locator:
    """Finds the part of this rank's parameters and buffers that belongs to an HF tensor."""

    def __init__(self, model: PolicyModel, groups: ParallelGroups, select: Select) -> None:
        self.model, self.groups, self.select = model, groups, select
        self.tensors = model.global_tensors()
        num_experts, self.num_layers = model.config.num_moe_experts, model.config.num_layers
        assert num_experts is not None, "every supported family has experts"
        self.experts_per_rank = num_experts // groups.ep_size

    def sources(self, part: WeightPart, owner: int) -> list[int]:
        """Global ranks whose shards make up the part, in shard order: of the copies of the model, the owner's."""
        stage = stage_of(part, self.num_layers, self.groups.pp_size)
        near = self.groups.places[owner]
        if part.expert is None:
            shards = range(self.groups.tp_size) if part.split != "whole" else [near.tp]
            wanted = [(tp, near.cp, near.dp, stage) for tp in shards]
            found = {(p.tp, p.cp, p.dp, p.pp): rank for rank, p in enumerate(self.groups.places)}
        else:
            ep = part.expert // self.experts_per_rank
            shards = range(self.groups.etp_size) if part.split != "whole" else [near.etp]
            wanted = [(etp, ep, near.edp, stage) for etp in shards]
            found = {(p.etp, p.ep, p.edp, p.pp): rank for rank, p in enumerate(self.groups.places)}
        return [found[place] for place in wanted]

    def held(self, part: WeightPart) -> list[tuple[str, Tensor]]:
        """(global name of the tensor, view of this rank's shard) for each tensor of this rank that holds it."""
        if part.expert is not None:
            local = part.expert - self.groups.ep_rank * self.experts_per_rank
            return self._expert(part, local) if 0 <= local < self.experts_per_rank else []
        names = [name for name in part.params if name in self.tensors][:1]
        if part.copy_on_last in self.tensors:
            names.append(part.copy_on_last)
        return [(name, part.part(self.select(self.tensors[name]))) for name in names]

    def _expert(self, part: WeightPart, local: int) -> list[tuple[str, Tensor]]:
        (linear,) = part.params
        for name, index in ((f"{linear}_weight", local), (f"{linear}.weight{local}", None)):
            if name in self.tensors:
                tensor = self.select(self.tensors[name])
                return [(name, part.part(tensor if index is None else tensor[index]))]
        return []


def _dtype_name(part: WeightPart, model: PolicyModel) -> str:
    return part.dtype or str(model.config.params_dtype).removeprefix("torch.")


def _ways(part: WeightPart, groups: ParallelGroups, place: Place) -> tuple[int, int]:
    """(number of shards, this place's shard) of a part that is split."""
    return (groups.tp_size, place.tp) if part.expert is None else (groups.etp_size, place.etp)


def _shard_shape(part: WeightPart, groups: ParallelGroups) -> Shape:
    shape = list(part.shape)
    if part.split != "whole":
        shape[0 if part.split == "rows" else 1] //= _ways(part, groups, groups.place)[0]
    return tuple(shape)


def _join(part: WeightPart, locate: Locator, groups: ParallelGroups, owner: int) -> Tensor | None:
    """The whole tensor on owner, each shard sent by the rank that holds it. Every rank walks the parts in one order."""
    sources = locate.sources(part, owner)
    if groups.rank not in (owner, *sources):
        return None
    mine = None
    if groups.rank in sources:
        held = locate.held(part)
        assert held, f"rank {groups.rank} holds {part.name}"
        mine = held[0][1].detach().reshape(_shard_shape(part, groups)).contiguous()
    if groups.rank != owner:
        dist.send(mine, dst=owner)  # type: ignore[arg-type]
        return None
    shards = [mine if source == owner else _receive(part, locate, source) for source in sources]
    assert all(shard is not None for shard in shards), f"every shard of {part.name} has come"
    return shards[0] if len(shards) == 1 else torch.cat(shards, dim=0 if part.split == "rows" else 1)  # type: ignore[arg-type]


def _receive(part: WeightPart, locate: Locator, source: int) -> Tensor:
    like = locate.select(next(iter(locate.model.parameters())))
    dtype = getattr(torch, part.dtype) if part.dtype else like.dtype
    received = torch.empty(_shard_shape(part, locate.groups), dtype=dtype, device=like.device)
    dist.recv(received, src=source)
    return received


def check_available(model: PolicyModel, available: Mapping[str, Shape]) -> None:
    """DataError unless these are the tensors of the model."""
    check_tensors(model.hf_config, available)


def _check_written(tensors: Mapping[str, Tensor], written: Mapping[str, int]) -> None:
    """Every element of every parameter and buffer was written exactly once."""
    for name, tensor in tensors.items():
        assert written[name] == tensor.numel(), f"{name}: {written[name]} of {tensor.numel()} elements written"
        if bool(tensor.isnan().any()):
            raise DataError(f"weights must be numbers, got NaN in the HF tensors of {name}; use undamaged weights")
