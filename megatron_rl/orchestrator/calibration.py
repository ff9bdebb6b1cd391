"""Rollouts that are measured and never trained: the engine's own log-probs under the weights that both sides hold."""

import asyncio

import numpy as np

from megatron_rl.config import RunError
from megatron_rl.orchestrator.source import PromptSource
from megatron_rl.records import Rollout, RolloutGroup, Sample
from megatron_rl.rewards.admission import Admission
from megatron_rl.rewards.advantage import group_samples
from megatron_rl.rollout.env import Renderer
from megatron_rl.rollout.run import Generator, RolloutConfig, run_rollout


class CalibrationError(RunError):
    """No rollout of a calibration came back."""


async def calibration_samples(
    source: PromptSource,
    generator: Generator,
    renderer: Renderer,
    config: RolloutConfig,
    *,
    step: int,
    num_rollouts: int,
    max_concurrent: int,
) -> list[Sample]:
    """One rollout for each of num_rollouts training prompts, sampled as rollouts for training are; advantages are 0.

    Which prompts is a function of seed and step alone and draws nothing from the source. Rollouts whose infrastructure
    failed are left out. CalibrationError if all of them failed.
    """
    gate = asyncio.Semaphore(max_concurrent)

    async def attempt(number: int) -> list[Sample]:
        prompt = source.measured_prompt(step, number)
        async with gate:
            environment = source.environment(prompt.environment)
            rollout = await run_rollout(prompt, environment, generator, renderer, config, index=0)
        errors.append(rollout.error)
        return [] if rollout.error else _untrained(RolloutGroup(prompt.prompt_id, prompt, [rollout]), rollout)

    errors: list[str] = []
    samples = await asyncio.gather(*(attempt(number) for number in range(num_rollouts)))
    if all(errors):
        raise CalibrationError(
            f"calibration after step {step} needs rollouts, but all {num_rollouts} failed; mend what the first of them "
            f"met: {errors[0]}"
        )
    return [sample for of_rollout in samples for sample in of_rollout]


def _untrained(group: RolloutGroup, rollout: Rollout) -> list[Sample]:
    samples = group_samples(group, Admission([rollout], ""))
    for sample in samples:
        sample.advantages = np.zeros(len(sample.token_ids), dtype=np.float32)
    return samples
