"""The SFT trainer: packed conversations, assistant tokens only, one global denominator per step."""

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from megatron_rl_kernels import LogprobOut

from megatron_rl.checkpoint.folders import reading
from megatron_rl.checkpoint.resume import read_extra
from megatron_rl.data.packing import pack_for_ranks
from megatron_rl.data.render import ChatRenderer, load_tokenizer
from megatron_rl.data.sft import SftDataConfig, sft_samples
from megatron_rl.data.stream import SftStream
from megatron_rl.distributed.config import ParallelConfig
from megatron_rl.distributed.device import Platform
from megatron_rl.distributed.groups import ParallelGroups
from megatron_rl.loss.head import sft_loss
from megatron_rl.model.build import ModelConfig
from megatron_rl.records import PackedBatch
from megatron_rl.telemetry.sinks import write_status
from megatron_rl.telemetry.values import Last, Mean, Value
from megatron_rl.trainer.base import PolicyTrainer
from megatron_rl.trainer.config import SftTrainerConfig
from megatron_rl.trainer.schedule import learning_rate
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
        renderer = ChatRenderer(load_tokenizer(job.model.path))
        if groups.rank == 0:
            write_status(job.run_dir, "reading conversations")
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
        self.base = PolicyTrainer(
            job.run_dir, job.model, job.trainer, phase="sft", platform=platform, groups=groups, parallel=parallel
        )
        if self.base.checkpoint is not None:
            with reading(self.base.checkpoint):
                self.stream.load_state_dict(msgspec.json.decode(read_extra(self.base.checkpoint, "data")))

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.base.step

    def run(self) -> None:
        """Trains from the current step to the last one and exports the weights."""
        config = self.job.trainer
        while self.step < config.steps:
            metrics = self._train_one()
            if self.has_heldout and (self.step % config.heldout_every_steps == 0 or self.step == config.steps):
                metrics["loss/heldout"] = self._heldout_loss()
            self.base.write(metrics)
            self.base.finish_step(lambda: {"data": msgspec.json.encode(self.stream.state_dict())})
        self.base.export()

    def _train_one(self) -> dict[str, Any]:
        started = time.monotonic()
        batch = self.stream.next_step(self.step)
        lr = learning_rate(self.job.trainer.optimizer, step=self.step, total_steps=self.job.trainer.steps)
        microbatches = batch.microbatches[self.groups.dp_rank]
        grad_norm, metrics = train_step(
            self.base.policy,
            microbatches,
            partial(self._loss, denominator=batch.denominator),
            self.groups,
            step=self.step,
            lr=lr,
            device=self.platform.device,
        )
        num_tokens = sum(m.num_tokens - m.num_padding for rank in batch.microbatches for m in rank)
        step_s = time.monotonic() - started
        self.base.step += 1
        return {
            **self.base.reduce(metrics),
            "grad_norm": Last(grad_norm),
            "learning_rate": Last(lr),
            "tokens/trained": Last(batch.num_trained),
            "perf/step_s": Last(step_s),
            "perf/tokens_per_s": Last(num_tokens / step_s),
        }

    def _loss(self, out: LogprobOut, batch: PackedBatch, *, denominator: float) -> tuple[torch.Tensor, dict[str, Any]]:
        mask = torch.tensor(batch.loss_mask, device=self.platform.device)
        loss = sft_loss(out.logp, mask, denominator=denominator)
        return loss, {"loss/sft": Mean(float(loss.detach()) * denominator, batch.num_trained)}

    def _heldout_loss(self) -> Value:
        """Mean negative log-likelihood per trained token, in nats, over all held-out rows."""
        metrics = evaluate(
            self.base.policy,
            self.heldout[self.groups.dp_rank],
            partial(self._loss, denominator=1),
            self.groups,
            device=self.platform.device,
        )
        return self.base.reduce(metrics)["loss/sft"]
