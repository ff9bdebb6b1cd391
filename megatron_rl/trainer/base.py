"""What the SFT and the RL trainer share: a policy that is fresh or resumed, where metrics go, how state is saved."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_rl.checkpoint.convert import load_hf, save_hf
from megatron_rl.checkpoint.folders import META_NAME
from megatron_rl.checkpoint.resume import latest_checkpoint, load_training_state
from megatron_rl.checkpoint.writer import CheckpointWriter
from megatron_rl.config import RunError, RunStop
from megatron_rl.distributed.config import ParallelConfig
from megatron_rl.distributed.device import Platform
from megatron_rl.distributed.groups import ParallelGroups
from megatron_rl.model.build import ModelConfig, build_model
from megatron_rl.telemetry.sinks import MetricsWriter, truncate_after, write_status
from megatron_rl.telemetry.values import Value, reduce_over_ranks
from megatron_rl.trainer.config import TrainerConfig
from megatron_rl.trainer.optim import PolicyOptimizer
from megatron_rl.trainer.stop import StopSignal, on_any_rank


class PolicyTrainer:
    """A policy with its optimizer at some step. Collective: every rank runs the same calls; rank 0 writes."""

    def __init__(
        self,
        run_dir: Path,
        model_config: ModelConfig,
        config: TrainerConfig,
        *,
        phase: str,
        platform: Platform,
        groups: ParallelGroups,
        parallel: ParallelConfig,
    ) -> None:
        """From the newest checkpoint of the run folder, or from the model folder if there is none."""
        self.run_dir, self.phase, self.platform, self.groups = run_dir, phase, platform, groups
        self._model_path, self._config = Path(model_config.path), config
        self.is_writer = groups.rank == 0
        self.checkpoint = _agreed_checkpoint(run_dir / "checkpoints")
        self.model = build_model(model_config, parallel, groups, platform)
        if self.checkpoint is None:
            load_hf(self.model, self._model_path, groups)
        self.policy = PolicyOptimizer(self.model, groups, config.optimizer)
        self.step = 0
        self.extra: dict[str, bytes] = {}
        """What other parts of the run gave to the checkpoint this one goes on from."""
        if self.checkpoint is not None:
            self.step, self.extra = load_training_state(
                self.checkpoint,
                model=self.model,
                optimizer=self.policy.optimizer,
                groups=groups,
                model_path=self._model_path,
            )
        self._writer = CheckpointWriter(run_dir / "checkpoints", groups, config.checkpoint, model_path=self._model_path)
        self._stop = StopSignal()
        if self.is_writer:
            truncate_after(run_dir, self.step, phase=phase)
        self._metrics = MetricsWriter(run_dir) if self.is_writer else None

    def finish_step(self, extra: Callable[[], Mapping[str, bytes]]) -> None:
        """Saves after a step that the run file names, after the last one, and when any rank got a SIGTERM.

        extra: state of other parts of the run, asked for when it is saved. RunStop after a SIGTERM, once the state is
        on the disk; RunError when a save cannot be written, also one in the background.
        """
        asked, failed = on_any_rank([self._stop.came, self._writer.failed()], self.platform.device)
        if failed:
            self._writer.wait()
        last = self.step == self._config.steps
        if asked or last or self.step % self._config.checkpoint.every_steps == 0:
            self.save(extra())
        if asked:
            self._writer.wait()
            raise RunStop(
                f"stopped by SIGTERM after step {self.step}, which is saved; start the same command again to go on"
            )

    def save(self, extra: Mapping[str, bytes]) -> None:
        """Training state under RUN/checkpoints; extra is kept with it, in the same rename."""
        self.status(f"saving checkpoint of step {self.step}")
        self._writer.save(self.step, model=self.model, optimizer=self.policy.optimizer, extra=extra)

    def export(self) -> None:
        """RUN/hf, if the run wants it; the last checkpoint is complete before."""
        self._writer.wait()
        if self._config.export:
            self.status("writing the Hugging Face folder")
            save_hf(self.model, self.run_dir / "hf", self.groups, source=self._model_path)

    def reduce(self, metrics: Mapping[str, Value]) -> dict[str, Value]:
        """Metrics of all data-parallel ranks, equal on each; ranks of one tensor-parallel group count once."""
        return reduce_over_ranks(metrics, self._gather)

    def write(self, metrics: Mapping[str, Value]) -> None:
        """Into metrics.jsonl, under the current step."""
        if self._metrics is not None:
            self._metrics.write(self.step, metrics, phase=self.phase)
        if self.policy.straggler.warning:
            self.status(self.policy.straggler.warning)

    def status(self, text: str) -> None:
        """What the run does now, for the progress display."""
        if self.is_writer:
            write_status(self.run_dir, text)

    def _gather(self, metrics: dict[str, Any]) -> list[dict[str, Any]]:
        gathered: list[Any] = [None] * self.groups.dp_size
        dist.all_gather_object(gathered, metrics, group=self.groups.dp_group)
        return gathered


def _agreed_checkpoint(folder: Path) -> Path | None:
    """What rank 0 finds: a shared file system may show another rank an older listing. Collective."""
    found = [latest_checkpoint(folder)]
    dist.broadcast_object_list(found, src=0)
    (checkpoint,) = found
    missing = checkpoint is not None and not (checkpoint / META_NAME).is_file()
    who_misses: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(who_misses, missing)
    if any(who_misses):
        raise RunError(
            f"every rank must see the checkpoint that rank 0 resumes from, {checkpoint}, got none on rank "
            f"{who_misses.index(True)}; put run.dir on a file system that all nodes share, or try again later"
        )
    return checkpoint
