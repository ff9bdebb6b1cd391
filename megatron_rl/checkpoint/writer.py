"""Saves of a run, in the background if the run wants it.

Invariant: at most one save is under way, and what it writes no longer changes. Every rank makes the same calls in the
same order; the background thread communicates over a group of its own.
"""

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer

from megatron_rl.checkpoint.config import CheckpointConfig
from megatron_rl.checkpoint.snapshot import Buffers, Snapshot, snapshot_together, take_snapshot, write_snapshot
from megatron_rl.distributed.groups import ParallelGroups
from megatron_rl.model.policy import PolicyModel


class CheckpointWriter:
    """Writes checkpoints below a folder. Collective: making one, save and wait."""

    def __init__(
        self, folder: Path, groups: ParallelGroups, config: CheckpointConfig, *, model_path: Path | None = None
    ) -> None:
        """model_path: the folder with the tokenizer, whose digest is kept with each checkpoint."""
        self._folder, self._groups, self._config, self._model_path = Path(folder), groups, config, model_path
        self._group: Any = dist.new_group(backend="gloo")
        self._buffers: Buffers = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, step: int, *, model: PolicyModel, optimizer: MegatronOptimizer, extra: Mapping[str, bytes]) -> None:
        """The state after `step` optimizer steps, as it is now; extra: file name -> bytes, rank 0's are kept.

        Waits for an earlier save first. Returns when the checkpoint is complete or, if asynchronous, when it is copied
        to host memory. RunError, on every rank, when this or the earlier one cannot be taken or written on any.
        """
        self.wait()

        def take() -> Snapshot:
            snapshot = take_snapshot(
                step,
                model=model,
                optimizer=optimizer,
                groups=self._groups,
                extra=extra,
                model_path=self._model_path,
            )
            return snapshot.on_host(self._buffers) if self._config.asynchronous else snapshot

        snapshot = snapshot_together(step, take, self._group)
        if not self._config.asynchronous:
            write_snapshot(self._folder, snapshot, self._config, self._group)
            return
        # A daemon: a trainer that fails meanwhile ends at once and leaves half a checkpoint, which nobody reads.
        self._thread = threading.Thread(target=self._write, args=(snapshot,), name="checkpoint", daemon=True)
        self._thread.start()

    def failed(self) -> bool:
        """Whether the save in the background has failed on this rank by now; once all ranks know, each calls wait."""
        return self._error is not None

    def wait(self) -> None:
        """Returns when no save is under way; RunError, on every rank, when it could not be written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _write(self, snapshot: Snapshot) -> None:
        try:
            write_snapshot(self._folder, snapshot, self._config, self._group)
        except BaseException as error:  # whatever it is, wait raises it: a thread's own would be lost
            self._error = error
