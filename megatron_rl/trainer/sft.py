"""The SFT trainer: packed conversations, assistant tokens only, one global denominator per step."""

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron_rl_kernels import LogprobOut

from megatron_rl.checkpoint.folders import reading
from megatron_rl.checkpoint.resume import read_extra
from megatron_rl.data.render import ChatRenderer, load_tokenizer
from megatron_rl.data.sft import SftDataConfig
from megatron_rl.distributed.config import ParallelConfig
from megatron_rl.distributed.device import Platform
from megatron_rl.distributed.groups import ParallelGroups
from megatron_rl.loss.head import sft_loss
from megatron_rl.model.build import ModelConfig
from megatron_rl.model.folder import read_hf_config
from megatron_rl.records import PackedBatch
from megatron_rl.telemetry.sinks import write_status
from megatron_rl.telemetry.values import Last, Mean, Value
from megatron_rl.trainer.base import PolicyTrainer
from megatron_rl.trainer.config import SftTrainerConfig
from megatron_rl.trainer.schedule import learning_rate
from megatron_rl.trainer.sft_data import SftData
from megatron_rl.trainer.step import evaluate, train_step


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

    def __init__(self, job: SftJob, platform: Platform, groups: ParallelGroups, parallel: ParallelConfig) -> None:
        self.job, self.platform, self.groups = job, platform, groups
        if groups.rank == 0:
            write_status(job.run_dir, "opening the data")
        self.data = SftData(
            job.data,
            ChatRenderer(load_tokenizer(job.model.path)),
            groups,
            run_dir=job.run_dir,
            context_length=job.context_length,
            seed=job.seed,
            hf_config=read_hf_config(Path(job.model.path)),
        )
        self.heldout = self.data.heldout()
        self.base = PolicyTrainer(
            job.run_dir, job.model, job.trainer, phase="sft", platform=platform, groups=groups, parallel=parallel
        )
        self.base.status("filling packing buffers" if job.data.packing.kind == "stream" else "reading the first step")
        if self.base.checkpoint is not None:
            with reading(self.base.checkpoint):
                self.data.load(read_extra(self.base.checkpoint, "data"))

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.base.step

    def run(self) -> None:
        """Trains from the current step to the last one and exports the weights."""
        config = self.job.trainer
        try:
            while self.step < config.steps:
                metrics = self._train_one()
                if self.job.data.heldout and (self.step % config.heldout_every_steps == 0 or self.step == config.steps):
                    metrics["loss/heldout"] = self._heldout_loss()
                self.base.write(metrics)
                self.base.finish_step(lambda: {"data": self.data.save()})
        finally:
            self.data.close()
        self.base.export()

    def _train_one(self) -> dict[str, Any]:
        started = time.monotonic()
        batch = self.data.next_step()
        lr = learning_rate(self.job.trainer.optimizer, step=self.step, total_steps=self.job.trainer.steps)
        grad_norm, metrics = train_step(
            self.base.policy,
            batch.microbatches,
            partial(self._loss, denominator=batch.num_trained),
            self.groups,
            step=self.step,
            lr=lr,
            device=self.platform.device,
        )
        step_s = time.monotonic() - started
        self.base.step += 1
        return {
            **self.base.reduce(metrics),
            **batch.metrics,
            "grad_norm": Last(grad_norm),
            "learning_rate": Last(lr),
            "tokens/trained": Last(batch.num_trained),
            "perf/step_s": Last(step_s),
            "perf/tokens_per_s": Last(batch.num_tokens / step_s),
        }

    def _loss(self, out: LogprobOut, batch: PackedBatch, *, denominator: float) -> tuple[torch.Tensor, dict[str, Any]]:
        mask = torch.tensor(batch.loss_mask, device=self.platform.device)
        loss = sft_loss(out.logp, mask, denominator=denominator)
        return loss, {"loss/sft": Mean(float(loss.detach()) * denominator, batch.num_trained)}

    def _heldout_loss(self) -> Value:
        """Mean negative log-likelihood per trained token, in nats, over all held-out rows."""
        metrics = evaluate(
            self.base.policy,
            self.heldout,
            partial(self._loss, denominator=1),
            self.groups,
            device=self.platform.device,
        )
        return self.base.reduce(metrics)["loss/sft"]
