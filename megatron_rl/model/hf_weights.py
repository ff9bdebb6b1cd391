"""The model's weights under their Hugging Face names, one tensor at a time, whatever the parallel layout."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.config import DataError
from megatron_rl.distributed.groups import ParallelGroups
from megatron_rl.model.families.family import WeightPart
from megatron_rl.model.policy import PolicyModel

Select = Callable[[torch.nn.Parameter], Tensor]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class HfTensorSpec:
    """Name, dtype (torch's name without the module) and shape of one HF tensor."""

    name: str
    dtype: str
    shape: Shape


def hf_layout(model: PolicyModel, groups: ParallelGroups) -> list[HfTensorSpec]:
    """Every HF tensor of the whole model, sorted by name; identical on every rank of groups."""
    dtype = str(model.config.params_dtype).removeprefix("torch.")
    return [HfTensorSpec(part.name, dtype, part.shape) for part in model.weight_parts]


def export_hf(
    model: PolicyModel,
    groups: ParallelGroups,
    *,
    owners: Mapping[str, int] | None = None,
    select: Select = lambda parameter: parameter,
) -> Iterator[tuple[str, Tensor | None]]:
    """Walks the HF tensors in layout order; each is whole on its owner, None elsewhere. Collective.

    Every rank must take every item. owners: HF name -> global rank, rank 0 where not named. A tensor may share memory
    with a parameter: copy it before the next optimizer step. select replaces a parameter by a tensor of its shape,
    such as its gradient.
    """
    locate = _Locator(model, groups, select)
    for part in model.weight_parts:
        owner = 0 if owners is None else owners.get(part.name, 0)
        if part.expert is None:
            yield part.name, _join_shards(part, locate, groups, owner)
        else:
            yield part.name, _fetch_expert(part, locate, groups, owner)


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
        _check_available(model, available)
    locate = _Locator(model, groups, lambda parameter: parameter)
    written = dict.fromkeys(locate.parameters, 0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
        for part in model.weight_parts:
            held = locate.held(part)
            if held is None:
                continue
            tensor = read(part.name)
            if tuple(tensor.shape) != part.shape:
                raise DataError(_misshapen(part.name, tuple(tensor.shape), part.shape))
            shard = tensor if part.split == "whole" else _shard(tensor, part, groups)
            held.copy_(shard.reshape(held.shape))
            written[locate.name(part)] += held.numel()
    _check_written(model, written)


class _Locator:
    """Finds the part of this rank's parameters that belongs to an HF tensor."""

    def __init__(self, model: PolicyModel, groups: ParallelGroups, select: Select) -> None:
        self.parameters = dict(model.named_parameters())
        self.select = select
        assert model.config.num_moe_experts is not None, "every supported family has experts"
        self.experts_per_rank = model.config.num_moe_experts // groups.ep_size
        self.first_expert = groups.ep_rank * self.experts_per_rank

    def expert_rank(self, part: WeightPart) -> int:
        """Rank inside the expert-parallel group that holds the part."""
        assert part.expert is not None, f"{part.name} belongs to no expert"
        return part.expert // self.experts_per_rank

    def name(self, part: WeightPart, expert: int | None = None) -> str:
        """Name of the parameter that holds the part, or expert's counterpart of it."""
        if part.expert is None:
            return next(name for name in part.params if name in self.parameters)
        (linear,) = part.params
        stacked = f"{linear}_weight"
        local = (part.expert if expert is None else expert) - self.first_expert
        return stacked if stacked in self.parameters else f"{linear}.weight{local}"

    def held(self, part: WeightPart) -> Tensor | None:
        """View of this rank's shard of the part; None where another expert rank holds it."""
        if part.expert is None:
            return part.part(self.select(self.parameters[self.name(part)]))
        local = part.expert - self.first_expert
        return self._expert(part, local) if 0 <= local < self.experts_per_rank else None

    def like(self, part: WeightPart) -> Tensor:
        """A held tensor of the part's shape, dtype and device, whoever holds the part itself."""
        return self._expert(part, 0)

    def _expert(self, part: WeightPart, local: int) -> Tensor:
        parameter = self.select(self.parameters[self.name(part, self.first_expert + local)])
        return part.part(parameter[local] if parameter.dim() == 3 else parameter)


def _shard_shape(part: WeightPart, groups: ParallelGroups) -> Shape:
    shape = list(part.shape)
    if part.split != "whole":
        shape[0 if part.split == "rows" else 1] //= groups.tp_size
    return tuple(shape)


def _shard(tensor: Tensor, part: WeightPart, groups: ParallelGroups) -> Tensor:
    return tensor.chunk(groups.tp_size, dim=0 if part.split == "rows" else 1)[groups.tp_rank]


def _join_shards(part: WeightPart, locate: _Locator, groups: ParallelGroups, owner: int) -> Tensor | None:
    """The whole tensor on owner, from the shards of owner's tensor-parallel group."""
    if owner not in groups.tp_ranks:
        return None
    held = locate.held(part)
    assert held is not None, f"{part.name} is held by every expert-parallel rank"
    shard = held.detach().reshape(_shard_shape(part, groups)).contiguous()
    if part.split == "whole" or groups.tp_size == 1:
        return shard if groups.rank == owner else None
    shards = [torch.empty_like(shard) for _ in range(groups.tp_size)] if groups.rank == owner else None
    dist.gather(shard, shards, dst=owner, group=groups.tp_group)
    return None if shards is None else torch.cat(shards, dim=0 if part.split == "rows" else 1)


def _fetch_expert(part: WeightPart, locate: _Locator, groups: ParallelGroups, owner: int) -> Tensor | None:
    """The expert's tensor on owner, from the rank of owner's expert-parallel group that holds it."""
    if owner not in groups.ep_ranks:
        return None
    holder = groups.ep_ranks[locate.expert_rank(part)]
    held = locate.held(part)
    if groups.rank == holder:
        assert held is not None, f"rank {holder} holds {part.name}"
        tensor = held.detach().contiguous()
        if holder == owner:
            return tensor
        dist.send(tensor, dst=owner)
        return None
    if groups.rank != owner:
        return None
    received = torch.empty_like(locate.like(part), memory_format=torch.contiguous_format, requires_grad=False)
    dist.recv(received, src=holder)
    return received


def _misshapen(name: str, got: Shape, expected: Shape) -> str:
    return f"weight {name} must have shape {list(expected)} by config.json, got {list(got)}; use the matching files"


def _check_available(model: PolicyModel, available: Mapping[str, Shape]) -> None:
    expected = {part.name: part.shape for part in model.weight_parts}
    redundant = model.family.redundant_tensors(model.hf_config)
    missing = [f"weight {name} is missing" for name in expected if name not in available]
    extra = [f"weight {name} has no place in the model" for name in available if name not in expected | redundant]
    misshapen = [
        _misshapen(name, tuple(available[name]), shape)
        for name, shape in expected.items()
        if name in available and tuple(available[name]) != shape
    ]
    problems = missing + sorted(extra) + misshapen
    if problems:
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise DataError(
            f"the weights must be those of config.json ({model.family.architecture}, {len(expected)} tensors): "
            f"{'; '.join(problems[:5])}{more}"
        )


def _check_written(model: PolicyModel, written: Mapping[str, int]) -> None:
    """Every element of every parameter was written exactly once, and there is nothing else to write."""
    buffers = [name for name, _ in model.named_buffers()]
    assert not buffers, f"buffers {buffers} have no HF tensor; the family must say where their values come from"
    for name, parameter in model.named_parameters():
        assert written[name] == parameter.numel(), f"{name}: {written[name]} of {parameter.numel()} elements written"
        if bool(parameter.isnan().any()):
            raise DataError(f"weights must be numbers, got NaN in the HF tensors of {name}; use undamaged weights")
