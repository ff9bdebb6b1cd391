"""Run by torchrun: ranks publish their shares into one arena on rank 0. Writes what happened as JSON.

argv: result file.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.records import TensorSlot, WeightManifest
from megatron_rl.weight_sync.config import WeightSyncConfig
from megatron_rl.weight_sync.errors import WeightSyncError
from megatron_rl.weight_sync.nixl import NixlArena
from megatron_rl.weight_sync.plan import arena_nbytes
from megatron_rl.weight_sync.publisher import Publisher
from megatron_rl.weight_sync.receiver import WeightReceiver
from megatron_rl.weight_sync.transport import ArenaAddress

SPECS = [TensorSlot(f"t{i}", "float32", (1 + 7 * i, 3), 0, 0) for i in range(9)]


class Engine:
    """EngineTarget over an arena of this process."""

    url = "http://engine"

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}

    def wait_ready(self, timeout_s: float) -> None: ...

    def open_arena(self, slots: Sequence[TensorSlot], *, ucx_tls: str) -> ArenaAddress:
        self.receiver = WeightReceiver(slots, NixlArena(arena_nbytes(slots), ucx_tls=ucx_tls))
        return self.receiver.arena.address

    def commit(self, manifest: WeightManifest) -> None:
        self.receiver.commit(manifest, load=self._load, reload_initial=lambda: None)

    def _load(self, weights: Any) -> None:
        self.weights = {name: tensor.clone() for name, tensor in weights}


def main(result_file: str) -> None:
    dist.init_process_group("gloo")
    rank, engine = dist.get_rank(), Engine()
    version = 0

    def export(owners: Mapping[str, int]) -> Iterator[tuple[str, Tensor | None]]:
        for spec in SPECS:
            dist.barrier()  # an export is collective: ranks that left it early would hang the others
            owner = owners[spec.name]
            tensor = torch.full(spec.shape, 100.0 * version + owner)
            wrong = rank == owner == 1 and version == 2
            yield spec.name, tensor[:1] if wrong else tensor if owner == rank else None

    targets = [engine] if rank == 0 else []
    publisher = Publisher(SPECS, export, targets, config=WeightSyncConfig(transfer_timeout_s=30))
    outcomes: dict[str, Any] = {}
    for version in (1, 2, 3):
        try:
            publisher.publish(version)
            error = ""
        except WeightSyncError as failure:
            error = str(failure)
        errors: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(errors, error)
        values = {name: tensor.unique().tolist() for name, tensor in engine.weights.items()}
        outcomes[str(version)] = {"errors": errors, "values": values}
    if rank == 0:
        with open(result_file, "w", encoding="utf-8") as result:
            json.dump(outcomes, result)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
