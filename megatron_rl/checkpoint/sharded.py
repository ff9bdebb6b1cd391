"""Model and optimizer as Megatron's torch_dist checkpoint, which any parallel layout can read."""

from pathlib import Path

import torch
from megatron.core.optimizer import MegatronOptimizer

from megatron_rl.checkpoint.adam import set_adam_steps, start_adam
from megatron_rl.checkpoint.pieces import STEPS_KEY, Piece, training_pieces
from megatron_rl.checkpoint.torch_dist import PieceReader, write_pieces
from megatron_rl.distributed.groups import ParallelGroups
from megatron_rl.model.policy import PolicyModel


def save_sharded(
    folder: Path, model: PolicyModel, groups: ParallelGroups, optimizer: MegatronOptimizer | None = None
) -> None:
    """Every rank writes its main replicas into the existing empty folder. Collective."""
    if optimizer is not None:
        start_adam(optimizer)
    write_pieces(folder, training_pieces(model, groups, optimizer, every_replica=False))


def load_sharded(
    folder: Path, model: PolicyModel, groups: ParallelGroups, optimizer: MegatronOptimizer | None = None
) -> None:
    """Fills model and optimizer in place, whatever layout wrote them. DataError when anything is not there whole."""
    steps = torch.zeros(1, dtype=torch.int64)
    if optimizer is not None:
        start_adam(optimizer)
    pieces = training_pieces(model, groups, optimizer, every_replica=True)
    if optimizer is not None:
        pieces.append(Piece(STEPS_KEY, (1,), (0,), (1,), torch.int64, lambda: steps))
    PieceReader(folder).read(pieces)
    if optimizer is not None:
        set_adam_steps(optimizer, int(steps))
