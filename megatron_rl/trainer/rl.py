"""The RL trainer: batch, step, weights into the running engines, check, next.

Invariants: weight version k is the policy after k optimizer steps; the batch of step k was sampled by version k or
older; after an update no batch is asked for before the engines hold the version and a probe text agrees on both sides;
what is measured on held-out prompts or for calibration is sampled by the trainer's own version.
"""

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron_rl_kernels import LogprobOut

from megatron_rl.data.render import load_tokenizer
from megatron_rl.distributed.config import ParallelConfig
from megatron_rl.distributed.device import Platform
from megatron_rl.distributed.groups import ParallelGroups
from megatron_rl.engine.client import EngineControl
from megatron_rl.loss.config import LossConfig
from megatron_rl.loss.head import rl_loss
from megatron_rl.loss.snr import record_metrics
from megatron_rl.model.build import ModelConfig
from megatron_rl.model.forward import DeviceBatch
from megatron_rl.model.hf_weights import export_hf, hf_layout
from megatron_rl.model.pipeline import from_last_stage, score_all_tokens, score_tokens
from megatron_rl.model.router_margin import watch_routers
from megatron_rl.records import PackedBatch, StepBatch, wire
from megatron_rl.telemetry.rollouts import RolloutLog, TokenRecord
from megatron_rl.telemetry.values import Last, from_wire
from megatron_rl.trainer.base import PolicyTrainer
from megatron_rl.trainer.config import RlTrainerConfig
from megatron_rl.trainer.frozen_policies import FrozenPolicies
from megatron_rl.trainer.link import OrchestratorLink
from megatron_rl.trainer.objective import RunningObjective
from megatron_rl.trainer.probe import ProbeResult, WeightProbe
from megatron_rl.trainer.ratio_monitor import RatioMonitor
from megatron_rl.trainer.rl_streams import rl_streams
from megatron_rl.trainer.rollout_log import token_records
from megatron_rl.trainer.schedule import learning_rate
from megatron_rl.trainer.step import train_step
from megatron_rl.weight_sync.publisher import Publisher, WeightSyncConfig


@dataclass(frozen=True)
class RlJob:
    """Everything the RL trainer is told; assembled from the run's config by the command line."""

    run_dir: Path
    model: ModelConfig
    trainer: RlTrainerConfig
    loss: LossConfig
    weight_sync: WeightSyncConfig
    temperature: float
    orchestrator_address: str
    engine_urls: list[str]
    engine_timeout_s: float
    low_precision: bool
    """Trainer or engines compute in bfloat16."""


class RlTrainer:
    """Holds the policy and its links; run() trains to the last step. Collective: every rank runs the same calls."""

    def __init__(self, job: RlJob, platform: Platform, groups: ParallelGroups, parallel: ParallelConfig) -> None:
        self.job, self.platform, self.groups = job, platform, groups
        self.tokenizer = load_tokenizer(job.model.path)
        self.base = PolicyTrainer(
            job.run_dir, job.model, job.trainer, phase="rl", platform=platform, groups=groups, parallel=parallel
        )
        self.link = OrchestratorLink(
            job.orchestrator_address,
            timeout_s=job.trainer.batch_timeout_s,
            rank=groups.rank,
            device=platform.device,
        )
        urls = job.engine_urls if self.base.is_writer else []
        self.controls = [EngineControl(url, timeout_s=job.engine_timeout_s) for url in urls]
        self.publisher = Publisher(
            hf_layout(self.base.model, groups),
            lambda owners: export_hf(self.base.model, groups, owners=owners),
            self.controls,
            config=job.weight_sync,
        )
        self.probe = WeightProbe(self.tokenizer, pad_multiple=groups.tp_size)
        self.objective = RunningObjective(job.loss, self.base.extra.get("objective"))
        self.frozen = FrozenPolicies(
            self.base,
            reference=job.trainer.reference,
            loss=job.loss,
            model_path=Path(job.model.path),
            temperature=job.temperature,
            platform=platform,
            groups=groups,
        )
        self.ratio = RatioMonitor(job.trainer.snr, job.run_dir, groups) if job.trainer.snr is not None else None
        self.rollout_log = RolloutLog(job.run_dir) if self.base.is_writer else None
        place, first = groups.place, groups.places[0]
        self.serves_rank_0 = (place.tp, place.cp, place.dp) == (first.tp, first.cp, first.dp)

    @property
    def step(self) -> int:
        """Optimizer steps done; also the number of the version that these weights are."""
        return self.base.step

    def run(self) -> None:
        """Trains from the current step to the last one; returns when the orchestrator knows that it is over."""
        sync_metrics = self._publish()
        uncalibrated = self.ratio is not None and self.objective.noise is None
        self._measure(evaluation=self.step == 0, calibration=uncalibrated)
        while self.step < self.job.trainer.steps:
            self._train_one(sync_metrics)
            evaluation, calibration = self._evaluates_now(), self._calibrates_now()
            update = evaluation or calibration or self.step % self.job.weight_sync.every_steps == 0
            sync_metrics = self._publish() if update else {}
            self._measure(evaluation=evaluation, calibration=calibration)
            self.frozen.after_step(self.step)
            self.base.finish_step(self._state_of_others)
        self.base.export()
        self.link.ask(wire.RunFinished(step=self.step))
        self.link.close()

    def _train_one(self, sync_metrics: dict[str, Any]) -> None:
        started = time.monotonic()
        self.base.status(f"step {self.step + 1}: waiting for rollouts")
        reply = self.link.ask(
            wire.BatchRequest(step=self.step, weight_version=self.step, data_parallel_size=self.groups.dp_size)
        )
        assert isinstance(reply, wire.BatchReply), f"expected a batch, got {type(reply).__name__}"
        batch, waited_s = reply.batch, time.monotonic() - started
        self.base.status(f"step {self.step + 1}: training")
        microbatches = self.frozen.scored(batch.microbatches[self.groups.dp_rank], kl_coef=self.objective.kl_coef)
        records: list[TokenRecord] = []
        lr = learning_rate(self.job.trainer.optimizer, step=self.step, total_steps=self.job.trainer.steps)
        grad_norm, metrics = train_step(
            self.base.policy,
            microbatches,
            partial(self._loss, denominator=batch.denominator, records=records),
            self.groups,
            step=self.step,
            lr=lr,
            device=self.platform.device,
            temperature=self.job.temperature,
        )
        metrics, records = self.base.reduce(metrics), from_last_stage(records, self.groups)
        metrics |= self.objective.after_step(metrics)
        self.base.step += 1
        self.base.write(
            {
                **{name: from_wire(value) for name, value in batch.metrics.items()},
                **metrics,
                **sync_metrics,
                "grad_norm": Last(grad_norm),
                "learning_rate": Last(lr),
                "perf/rollout_s": Last(waited_s),
                "perf/step_s": Last(time.monotonic() - started),
                "perf/tokens_per_s": Last(_num_tokens(batch) / (time.monotonic() - started)),
            }
        )
        if self.rollout_log is not None and records:
            self.rollout_log.write(self.step, records)

    def _loss(
        self, out: LogprobOut, batch: PackedBatch, *, denominator: float, records: list[TokenRecord]
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        streams = rl_streams(out, batch, self.platform.device)
        loss, stats = rl_loss(
            streams,
            config=self.job.loss,
            denominator=denominator,
            kl_coef=self.objective.kl_coef,
            noise=self.objective.noise,
        )
        if self.ratio is not None:
            self.ratio.watch(streams, batch)
        missing = self.job.trainer.logged_rollouts_per_step - len(records)
        if self.serves_rank_0 and missing > 0:
            records += token_records(batch, stats, step=self.step + 1, token_text=self._token_text, limit=missing)
        return loss, stats.metrics

    def _evaluates_now(self) -> bool:
        return self.step % self.job.trainer.eval_every_steps == 0 or self.step == self.job.trainer.steps

    def _calibrates_now(self) -> bool:
        snr = self.job.trainer.snr
        return snr is not None and self.step % snr.every_steps == 0

    def _publish(self) -> dict[str, Any]:
        """Version self.step into every engine, then the probe check. Metrics of both."""
        self.base.status(f"weights of version {self.step} into the engine")
        started = time.monotonic()
        self.publisher.publish(self.step)
        publish_s = time.monotonic() - started
        self.frozen.after_update()
        probe = self._check_engines()
        return {
            "weights/publish_s": Last(publish_s),
            "weights/probe_max_error": Last(probe.max_error),
            "weights/probe_excused_tokens": Last(probe.num_excused),
        }

    def _check_engines(self) -> ProbeResult:
        """The probe texts on both sides; WeightProbeError on rank 0, where the engines are known."""
        batch = DeviceBatch.from_packed(self.probe.batch, self.platform.device)
        with watch_routers(self.base.model) as routers:
            out = score_tokens(self.base.policy.ddp, batch, self.groups)
        margin = routers.smallest(batch, self.groups).cpu().numpy()
        return self.probe.check(
            self.controls,
            out.logp.float().cpu().numpy(),
            None if self.job.low_precision else margin,
            version=self.step,
            tolerance=self.job.trainer.probe_tolerance,
        )

    def _measure(self, *, evaluation: bool, calibration: bool) -> None:
        """Held-out prompts, and the ratio of equal weights. The engines hold the trainer's version."""
        if evaluation:
            self.base.status(f"evaluating version {self.step} on held-out prompts")
            reply = self.link.ask(wire.EvalRequest(step=self.step, weight_version=self.step))
            assert isinstance(reply, wire.EvalReply), f"expected an evaluation, got {type(reply).__name__}"
            metrics = {name: from_wire(value) for name, value in reply.metrics.items()}
            self.base.write(metrics)
            self.frozen.after_evaluation(metrics)
        if calibration:
            self._calibrate()

    def _calibrate(self) -> None:
        """Fresh rollouts scored on both sides; from now on guards read what they say of the noise."""
        assert self.ratio is not None, "only a run with trainer.snr calibrates"
        self.base.status(f"measuring the ratio's noise at version {self.step}")
        request = wire.CalibrationRequest(
            step=self.step,
            weight_version=self.step,
            data_parallel_size=self.groups.dp_size,
            num_rollouts=self.ratio.config.prompts,
        )
        reply = self.link.ask(request)
        assert isinstance(reply, wire.CalibrationReply), f"expected a calibration, got {type(reply).__name__}"
        microbatches = reply.microbatches[self.groups.dp_rank]
        batches = [DeviceBatch.from_packed(packed, self.platform.device) for packed in microbatches]
        outputs = score_all_tokens(self.base.policy.ddp, batches, self.groups, temperature=self.job.temperature)
        for out, packed in zip(outputs, microbatches, strict=True):
            self.ratio.add_calibration(out, packed)
        record, self.objective.noise = self.ratio.measure(self.step, must_hold=self.objective.noise is None)
        self.base.write(record_metrics(record))
        if not record.identity.ok:
            self.base.status(f"warning: {record.identity.reason}; {record.identity.cure}")

    def _state_of_others(self) -> dict[str, bytes]:
        """For the checkpoint: what the run needs beside the policy and its optimizer."""
        reply = self.link.ask(wire.StateRequest(step=self.step))
        assert isinstance(reply, wire.StateReply), f"expected a state, got {type(reply).__name__}"
        return {"orchestrator": reply.state, "objective": self.objective.state(), **self.frozen.state()}

    def _token_text(self, token_id: int) -> str:
        return str(self.tokenizer.decode([token_id], skip_special_tokens=False))


def _num_tokens(batch: StepBatch) -> int:
    return sum(m.num_tokens - m.num_padding for rank in batch.microbatches for m in rank)
