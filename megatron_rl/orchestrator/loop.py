"""Answers the trainer, one request at a time.

Invariants: every drawn group leaves exactly once, in a batch or dropped with a reason that is counted; a prompt
index is never drawn twice within a run; a checkpoint of step k names the first prompt after step k.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence

import numpy as np
import zmq
import zmq.asyncio

from megatron_rl.config import RunError
from megatron_rl.data.packing import pack_for_ranks
from megatron_rl.data.render import ChatRenderer
from megatron_rl.loss.config import LossConfig
from megatron_rl.loss.reduce import reduction_weights, trained_mask
from megatron_rl.orchestrator.calibration import calibration_samples
from megatron_rl.orchestrator.config import OrchestratorConfig
from megatron_rl.orchestrator.evaluate import evaluate_policy, metrics_of, passed, was_cut
from megatron_rl.orchestrator.source import PromptSource
from megatron_rl.orchestrator.state import encode_state
from megatron_rl.records import PackedBatch, RolloutGroup, Sample, StepBatch, wire
from megatron_rl.rewards.admission import admit_group
from megatron_rl.rewards.advantage import group_samples
from megatron_rl.rollout.env import Environment
from megatron_rl.rollout.noise import with_noise
from megatron_rl.rollout.run import Generator, RolloutConfig, run_group
from megatron_rl.telemetry.values import Last, Max, Mean, Rate, Value, to_wire


class Orchestrator:
    """Environments, engines and groups of one run."""

    def __init__(
        self,
        environments: Sequence[Environment],
        source: PromptSource,
        generator: Generator,
        renderer: ChatRenderer,
        *,
        config: OrchestratorConfig,
        rollout: RolloutConfig,
        pad_multiple: int,
        loss: LossConfig | None = None,
    ) -> None:
        """loss: whose reduction weighs the tokens; None: LossConfig()."""
        self._environments, self._source, self._generator = environments, source, generator
        self._training_generator = with_noise(generator, sigma=rollout.injected_noise, seed=source.seed)
        self._renderer, self._config, self._rollout, self._pad_multiple = renderer, config, rollout, pad_multiple
        self._loss = loss or LossConfig()
        self._gate = asyncio.Semaphore(max(1, config.max_concurrent_rollouts // rollout.group_size))

    async def serve(self, address: str) -> None:
        """Answers requests at address until the trainer says that the run is finished."""
        socket = zmq.asyncio.Context.instance().socket(zmq.REP)
        socket.setsockopt(zmq.LINGER, 1000)
        socket.bind(address)
        try:
            while True:
                request = wire.decode(await socket.recv(), wire.Request)
                try:
                    reply = await self._answer(request)
                except Exception as error:
                    await socket.send(wire.encode(wire.Failed(message=f"{type(error).__name__}: {error}")))
                    raise
                await socket.send(wire.encode(reply))
                if isinstance(request, wire.RunFinished):
                    return
        finally:
            socket.close()

    async def _answer(self, request: wire.Request) -> wire.Reply:
        match request:
            case wire.BatchRequest():
                return wire.BatchReply(batch=await self.step_batch(request))
            case wire.EvalRequest():
                return wire.EvalReply(metrics={name: to_wire(v) for name, v in (await self.evaluate()).items()})
            case wire.CalibrationRequest():
                return wire.CalibrationReply(microbatches=await self.calibration_batch(request))
            case wire.StateRequest():
                return wire.StateReply(state=encode_state(self._source.state))
            case wire.RunFinished():
                return wire.Acknowledged()

    async def evaluate(self) -> dict[str, Rate | Mean]:
        """Pass rates, and what else evaluate_policy measures, of every held-out split."""
        results = await evaluate_policy(
            self._environments,
            self._generator,
            self._renderer,
            self._rollout,
            evaluation=self._config.evaluation,
            max_concurrent=self._config.max_concurrent_rollouts,
        )
        return metrics_of(results)

    async def step_batch(self, request: wire.BatchRequest) -> StepBatch:
        """Samples groups until the step is full or redraws run out, and packs what was admitted."""
        started = time.monotonic()
        drawn, admitted = await self._draw_groups(request.step)
        samples = [sample for group_samples in admitted for sample in group_samples]
        denominator = weigh_tokens(samples, self._loss)
        microbatches = self._pack(samples, request.data_parallel_size)
        self._source.state.groups_trained += len(admitted)
        metrics = _group_metrics(drawn, len(admitted), request.weight_version)
        metrics["perf/generation_s"] = Last(time.monotonic() - started)
        return StepBatch(
            step=request.step,
            microbatches=microbatches,
            num_trained=sum(_num_trained(sample) for sample in samples),
            denominator=denominator,
            metrics={name: to_wire(value) for name, value in metrics.items()},
        )

    async def calibration_batch(self, request: wire.CalibrationRequest) -> list[list[PackedBatch]]:
        """Packed rollouts of the weights the engines hold now, for measuring."""
        samples = await calibration_samples(
            self._source,
            self._training_generator,
            self._renderer,
            self._rollout,
            step=request.step,
            num_rollouts=request.num_rollouts,
            max_concurrent=self._config.max_concurrent_rollouts,
        )
        return self._pack(samples, request.data_parallel_size)

    def _pack(self, samples: Sequence[Sample], data_parallel_size: int) -> list[list[PackedBatch]]:
        return pack_for_ranks(
            samples,
            capacity=self._config.microbatch_tokens,
            data_parallel_size=data_parallel_size,
            pad_multiple=self._pad_multiple,
            pad_id=self._renderer.pad_id,
        )

    async def _draw_groups(self, step: int) -> tuple[list[RolloutGroup], list[list[Sample]]]:
        """(all groups drawn, samples of each admitted one); other prompts if a whole round has nothing to learn."""
        drawn: list[RolloutGroup] = []
        for _ in range(1 + self._config.max_empty_rounds):
            slots = await asyncio.gather(*(self._fill_slot() for _ in range(self._config.groups_per_step)))
            drawn += [group for groups, _ in slots for group in groups]
            admitted = [samples for _, samples in slots if samples]
            if admitted:
                return drawn, admitted
            if all(rollout.error for groups, _ in slots for group in groups for rollout in group.rollouts):
                # Other prompts will not help: with a stuck engine each round would cost a request's whole time-out.
                raise NothingToTrainError(
                    f"step {step} needs rollouts, but every one of a whole round failed; mend what the first of them "
                    f"met: {_first_error(drawn)}"
                )
        raise NothingToTrainError(
            f"step {step} needs at least one group with different rewards, got none of {len(drawn)} "
            f"({dict(_drop_reasons(drawn))}); choose easier or harder tasks or a larger rollout.group_size; "
            f"first error: {_first_error(drawn) or 'none'}"
        )

    async def _fill_slot(self) -> tuple[list[RolloutGroup], list[Sample]]:
        """(all groups drawn for one place in the batch, samples of the one admitted)."""
        drawn: list[RolloutGroup] = []
        environment = None
        for _ in range(1 + self._config.max_redraws):
            async with self._gate:
                prompt = self._source.draw(environment)
                environment = prompt.environment
                # A finite environment comes round again, perhaps within one step.
                group_id = f"{prompt.prompt_id}@{self._source.state.draws}"
                group = await run_group(
                    prompt,
                    self._source.environment(environment),
                    self._training_generator,
                    self._renderer,
                    self._rollout,
                    group_id=group_id,
                )
            drawn.append(group)
            admission = admit_group(group)
            if not admission.reason:
                return drawn, group_samples(group, admission)
        return drawn, []


class NothingToTrainError(RunError):
    """No group of a step had a learning signal."""


def weigh_tokens(samples: Sequence[Sample], loss: LossConfig) -> float:
    """Gives the samples of one step the loss weights of the reduction; returns the step's denominator.

    A rollout counts with all its segments. Weights that are all 1 are left out.
    """
    of_rollout: dict[tuple[str, int], list[Sample]] = {}
    for sample in samples:
        of_rollout.setdefault((sample.info["group_id"], sample.info["rollout"]), []).append(sample)
    counts = [sum(map(_num_trained, parts)) for parts in of_rollout.values()]
    weights, denominator = reduction_weights(counts, kind=loss.reduction, fixed_length=loss.fixed_length)
    if any(weight != 1.0 for weight in weights):
        for weight, parts in zip(weights, of_rollout.values(), strict=True):
            for sample in parts:
                sample.loss_weight = np.full(len(sample.token_ids), weight, dtype=np.float32)
    return denominator


def _num_trained(sample: Sample) -> int:
    """Sampled tokens whose engine log-prob is known."""
    assert sample.engine_logp is not None, "RL samples carry engine log-probs"
    return int(trained_mask(sample.loss_mask, sample.engine_logp).sum())


def _drop_reasons(groups: Sequence[RolloutGroup]) -> Counter[str]:
    return Counter(reason for group in groups if (reason := admit_group(group).reason))


def _group_metrics(groups: Sequence[RolloutGroup], kept: int, weight_version: int) -> dict[str, Value]:
    rollouts = [rollout for group in groups for rollout in group.rollouts if not rollout.error]
    lengths = [int(sum(s.sampled.sum() for s in rollout.segments)) for rollout in rollouts]
    versions = [int(s.weight_version[s.sampled].min()) for r in rollouts for s in r.segments if s.sampled.any()]
    metrics: dict[str, Value] = {
        "reward/mean": Mean(sum(r.rewards[-1] for r in rollouts), len(rollouts)),
        "pass_rate/train": Rate(sum(map(passed, rollouts)), len(rollouts)),
        "rollout/length_mean": Mean(sum(lengths), len(lengths)),
        "rollout/length_max": Max(max(lengths, default=0)),
        "rollout/cut_share": Mean(sum(map(was_cut, rollouts)), len(rollouts)),
        "rollout/errors": Last(sum(bool(r.error) for g in groups for r in g.rollouts)),
        "groups/drawn": Last(len(groups)),
        "groups/kept": Last(kept),
        "staleness/max": Max(max((weight_version - v for v in versions), default=0)),
    }
    metrics |= {f"groups/dropped/{reason}": Last(count) for reason, count in _drop_reasons(groups).items()}
    signals: dict[str, list[float]] = {}
    for rollout in rollouts:
        for name, value in rollout.signals.items():
            signals.setdefault(name, []).append(value)
    return metrics | {f"signal/{name}": Mean(sum(v), len(v)) for name, v in signals.items()}


def _first_error(groups: Sequence[RolloutGroup]) -> str:
    return next((r.error for g in groups for r in g.rollouts if r.error), "")
