"""The SFT trainer: packed conversations, assistant tokens only, one global denominator per step."""

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from megatron_rl.checkpoint.convert import load_hf, save_hf
from megatron_rl.checkpoint.folders import reading
from megatron_rl.checkpoint.resume import latest_checkpoint, load_training_state, read_extra, save_training_state
from megatron_rl.data.packing import pack_for_ranks
from megatron_rl.data.render import ChatRenderer, load_tokenizer
from megatron_rl.data.sft import SftDataConfig, sft_samples
from megatron_rl.data.stream import SftStream
from megatron_rl.distributed.device import Platform
from megatron_rl.distributed.groups import ParallelGroups
from megatron_rl.loss.head import sft_loss
from megatron_rl.model.build import ModelConfig, build_model
from megatron_rl.model.forward import DeviceBatch, taken_logprobs
from megatron_rl.records import PackedBatch
from megatron_rl.telemetry.sinks import MetricsWriter, truncate_after, write_status
from megatron_rl.telemetry.values import Last, Mean, Value, merge_metrics, reduce_over_ranks
from megatron_rl.trainer.config import SftTrainerConfig
from megatron_rl.trainer.optim import PolicyOptimizer
from megatron_rl.trainer.schedule import learning_rate
from megatron_rl.trainer.step import train_step


@dataclass(frozen=True)
class SftJob:
    """Everything the SFT trainer is told; assembled from the run's config by the command line."""

    run_dir: Path
    model: ModelConfig
    trainer: SftTrainerConfig
    data: SftDataConfig
    context_length: int
    seed: int


class SftTrainer:
    """Holds policy and data; run() trains to the last step. Collective: every rank runs the same calls."""

    def __init__(self, job: SftJob, platform: Platform, groups: ParallelGroups, parallel: Any) -> None:
        self.job, self.platform, self.groups = job, platform, groups
        renderer = ChatRenderer(load_tokenizer(job.model.path))
        self._status_enabled = groups.rank == 0
        self._status("reading conversations")
        train = [
            s for path in job.data.train for s in sft_samples(Path(path), renderer, context_length=job.context_length)
        ]
        heldout = [
            s for path in job.data.heldout for s in sft_samples(Path(path), renderer, context_length=job.context_length)
        ]
        self.heldout = pack_for_ranks(
            heldout,
            capacity=job.data.microbatch_tokens,
            data_parallel_size=groups.dp_size,
            pad_multiple=groups.tp_size,
            pad_id=renderer.pad_id,
        )
        self.has_heldout = bool(heldout)
        self.stream = SftStream(
            train,
            config=job.data,
            seed=job.seed,
            data_parallel_size=groups.dp_size,
            pad_multiple=groups.tp_size,
            pad_id=renderer.pad_id,
        )
        self.checkpoints = job.run_dir / "checkpoints"
        latest = latest_checkpoint(self.checkpoints)
        self.model = build_model(job.model, parallel, groups, platform)
        if latest is None:
            load_hf(self.model, Path(job.model.path), groups)
        self.policy = PolicyOptimizer(self.model, groups, job.trainer.optimizer)
        self.step = 0
        if latest is not None:
            self.step, _ = load_training_state(latest, model=self.model, optimizer=self.policy.optimizer, groups=groups)
            with reading(latest):
                self.stream.load_state_dict(msgspec.json.decode(read_extra(latest, "data")))
        self.metrics_writer = None
        if groups.rank == 0:
            truncate_after(job.run_dir, self.step, phase="sft")
            self.metrics_writer = MetricsWriter(job.run_dir)

    def run(self) -> None:
        """Trains from the current step to the last one and exports the weights."""
        config = self.job.trainer
        while self.step < config.steps:
            metrics = self._train_one()
            if self.has_heldout and (self.step % config.heldout_every_steps == 0 or self.step == config.steps):
                metrics["loss/heldout"] = self._heldout_loss()
            if self.metrics_writer is not None:
                self.metrics_writer.write(self.step, metrics, phase="sft")
            if self.step % config.checkpoint.every_steps == 0 or self.step == config.steps:
                self._save()
        if config.export:
            self._status("writing the Hugging Face folder")
            save_hf(self.model, self.job.run_dir / "hf", self.groups, source=Path(self.job.model.path))

    def _train_one(self) -> dict[str, Any]:
        started = time.monotonic()
        batch = self.stream.next_step(self.step)
        lr = learning_rate(self.job.trainer.optimizer, step=self.step, total_steps=self.job.trainer.steps)
        microbatches = batch.microbatches[self.groups.dp_rank]
        grad_norm, metrics = train_step(
            self.policy, microbatches, partial(self._loss, denominator=batch.num_trained), lr=lr
        )
        num_tokens = sum(m.num_tokens - m.num_padding for rank in batch.microbatches for m in rank)
        step_s = time.monotonic() - started
        self.step += 1
        return {
            **reduce_over_ranks(metrics, self._gather),
            "grad_norm": Last(grad_norm),
            "learning_rate": Last(lr),
            "tokens/trained": Last(batch.num_trained),
            "perf/step_s": Last(step_s),
            "perf/tokens_per_s": Last(num_tokens / step_s),
        }

    def _logprobs(self, batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """(log-probs [T], trained mask [T]) on the device."""
        out = taken_logprobs(self.policy.ddp, DeviceBatch.from_packed(batch, self.platform.device), self.groups)
        return out.logp, torch.tensor(batch.loss_mask, device=self.platform.device)

    def _loss(self, batch: PackedBatch, *, denominator: int) -> tuple[torch.Tensor, dict[str, Any]]:
        logp, mask = self._logprobs(batch)
        loss = sft_loss(logp, mask, denominator=denominator)
        return loss, {"loss/sft": Mean(float(loss.detach()) * denominator, batch.num_trained)}

    @torch.no_grad()
    def _heldout_loss(self) -> Value:
        """Mean negative log-likelihood per trained token, in nats, over all held-out rows."""
        collected = [self._loss(batch, denominator=1)[1] for batch in self.heldout[self.groups.dp_rank]]
        return reduce_over_ranks(merge_metrics(collected), self._gather)["loss/sft"]

    def _save(self) -> None:
        save_training_state(
            self.checkpoints,
            step=self.step,
            model=self.model,
            optimizer=self.policy.optimizer,
            groups=self.groups,
            extra={"data": msgspec.json.encode(self.stream.state_dict())},
            config=self.job.trainer.checkpoint,
        )

    def _gather(self, metrics: dict[str, Any]) -> list[dict[str, Any]]:
        gathered: list[Any] = [None] * self.groups.dp_size
        dist.all_gather_object(gathered, metrics, group=self.groups.dp_group)
        return gathered

    def _status(self, text: str) -> None:
        if self._status_enabled:
            write_status(self.job.run_dir, text)
