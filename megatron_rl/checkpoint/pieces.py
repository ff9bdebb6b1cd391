"""Training state as rectangles of global tensors: what this rank writes into a checkpoint, or wants out of one.

Names and global shapes are Megatron's own (torch_dist, optimizer state as its fully_reshardable format names it), so
any parallel layout reads what any other has written. The distributed optimizer gives each data-parallel rank a flat
range of every parameter; a range is at most a few rectangles, so ranks write their own part and gather nothing.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory, is_main_replica
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from megatron_rl.checkpoint.adam import adam_optimizers, adam_steps
from megatron_rl.checkpoint.boxes import dense_boxes
from megatron_rl.distributed.groups import ParallelGroups
from megatron_rl.model.policy import PolicyModel

Shape = tuple[int, ...]
STEPS_KEY = "optimizer.steps"
"""Optimizer steps done, int64 [1]."""


@dataclass(frozen=True)
class Piece:
    """A rectangle of a global tensor."""

    key: str
    global_shape: Shape
    offsets: Shape
    sizes: Shape
    dtype: torch.dtype
    resolve: Callable[[], Tensor]
    """The rectangle's numbers, in memory that may be written; as many as sizes say, in row-major order."""


@dataclass(frozen=True)
class Region:
    """A rectangle of a global tensor that lies, maybe with gaps, in one parameter or buffer of this rank."""

    name: str
    """Of the parameter or buffer, as state_dict names it."""
    tensor: ShardedTensor
    start: int
    """First element, counted in the flat parameter."""
    strides: Shape

    def piece(self, whole: Callable[[], Tensor]) -> Piece:
        """The region inside of whole(), a contiguous tensor like the parameter."""

        def resolve() -> Tensor:
            tensor = whole()
            return tensor.as_strided(self.local_shape, self.strides, tensor.storage_offset() + self.start)

        return self._piece(self.tensor.key, self.tensor.dtype, self.tensor.global_offset, self.local_shape, resolve)

    def pieces_of_range(self, prefix: str, shard: Tensor, start: int) -> Iterator[Piece]:
        """What of the region is in shard, which holds the flat parameter's elements from start on."""
        axes = len(self.tensor.global_offset) - len(self.local_shape)
        for box, flat in dense_boxes(self.local_shape, self.strides, self.start, start, start + shard.numel()):
            inside = (0,) * axes + tuple(low for low, _ in box)
            offsets = tuple(a + b for a, b in zip(self.tensor.global_offset, inside, strict=True))
            sizes = tuple(size for _, size in box)
            part = shard.narrow(0, flat - start, math.prod(sizes))
            yield self._piece(prefix + self.tensor.key, shard.dtype, offsets, sizes, lambda part=part: part)

    @property
    def local_shape(self) -> Shape:
        return tuple(self.tensor.local_shape)

    def _piece(
        self, key: str, dtype: torch.dtype, offsets: Shape, local_sizes: Shape, resolve: Callable[[], Tensor]
    ) -> Piece:
        sizes = (1,) * (len(offsets) - len(local_sizes)) + local_sizes
        return Piece(key, tuple(self.tensor.global_shape), tuple(offsets), sizes, dtype, resolve)


def model_regions(model: PolicyModel, groups: ParallelGroups) -> list[Region]:
    """Every parameter and persistent buffer of this rank, whole; also of a model on the meta device."""
    tensors: dict[str, Tensor] = {
        name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if not name.endswith("_extra_state")
    }
    metadata = {"singleton_local_shards": False, "dp_cp_group": groups.pg.dp_cp}
    regions = []
    for name, item in model.sharded_state_dict(metadata=metadata).items():
        if isinstance(item, ShardedObject):
            # Transformer Engine's state of FP8 scaling; without FP8 there is none.
            assert "_extra_state" in name, f"{name} is no tensor and would not be saved"
            continue
        whole = tensors[name]
        for part in nested_values([item.build() if isinstance(item, ShardedTensorFactory) else item]):
            data = part.data
            assert data.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr(), f"{name} is no view"
            regions.append(Region(name, part, data.storage_offset() - whole.storage_offset(), tuple(data.stride())))
    covered = {region.name for region in regions}
    assert covered == tensors.keys(), f"without a place in the checkpoint: {sorted(tensors.keys() ^ covered)}"
    return regions


def training_pieces(
    model: PolicyModel, groups: ParallelGroups, optimizer: MegatronOptimizer | None, *, every_replica: bool
) -> list[Piece]:
    """State of model and optimizer; of what several ranks hold, only the main replica unless every_replica."""
    tensors = model.state_dict(keep_vars=True)
    regions = model_regions(model, groups)
    pieces = [
        region.piece(lambda tensor=tensors[region.name]: tensor.detach())
        for region in regions
        if every_replica or is_main_replica(region.tensor.replica_id)
    ]
    if optimizer is None:
        return pieces
    by_name: dict[str, list[Region]] = {}
    for region in regions:
        # The last entry is the data-parallel rank; there every rank holds a part of its own.
        replica_id: Any = region.tensor.replica_id
        if every_replica or not any(replica_id[:-1]):
            by_name.setdefault(region.name, []).append(region)
    for name, parameter in model.named_parameters():
        for kind, shard, start in _shards(optimizer, parameter):
            for region in by_name.get(name, []):
                pieces += region.pieces_of_range(f"optimizer.state.{kind}.", shard, start)
    if groups.rank == 0 and not every_replica:
        steps = torch.tensor([adam_steps(optimizer)])
        pieces.append(Piece(STEPS_KEY, (1,), (0,), (1,), torch.int64, lambda: steps))
    return pieces


def _shards(optimizer: MegatronOptimizer, parameter: torch.nn.Parameter) -> Iterator[tuple[str, Tensor, int]]:
    """(kind of state, this rank's flat part of it, its first element) of a parameter. In float32 the parameter itself
    is the master weight."""
    for part in adam_optimizers(optimizer):
        if parameter not in part.model_param_gbuf_map:
            continue
        state: dict[str, Any] = part._get_main_param_and_optimizer_states(parameter)
        start = part._get_model_param_range_map(parameter)["param"].start
        kinds = ["exp_avg", "exp_avg_sq"] + ([] if parameter.dtype == torch.float32 else ["param"])
        yield from ((kind, state[kind].detach(), start) for kind in kinds)
