"""Pass rates on held-out prompts: one attempt per prompt at the sampling temperature."""

import asyncio
from collections.abc import Sequence

from megatron_rl.config import RunError
from megatron_rl.data.render import ChatRenderer
from megatron_rl.records import Rollout
from megatron_rl.rollout.env import Environment
from megatron_rl.rollout.run import Generator, RolloutConfig, run_rollout
from megatron_rl.telemetry.values import Rate


class EvaluationError(RunError):
    """Held-out rollouts failed for reasons outside the model; their pass rate would mean nothing."""


def passed(rollout: Rollout) -> bool:
    """An attempt passes when its last segment earned the whole reward."""
    return rollout.rewards[-1] >= 1.0 - 1e-9


async def pass_rates(
    environments: Sequence[Environment],
    generator: Generator,
    renderer: ChatRenderer,
    config: RolloutConfig,
    *,
    prompts_per_split: int,
    max_concurrent: int,
) -> dict[str, Rate]:
    """eval/pass_rate/ENVIRONMENT/SPLIT -> Rate, for every split but train. EvaluationError if any rollout failed."""
    gate = asyncio.Semaphore(max_concurrent)

    async def attempt(environment: Environment, split: str, index: int) -> Rollout:
        async with gate:
            return await run_rollout(
                environment.prompt(split, index), environment, generator, renderer, config, index=0
            )

    rates = {}
    for environment in environments:
        for split in environment.splits:
            if split == "train":
                continue
            size = environment.size(split)
            count = prompts_per_split if size is None else min(size, prompts_per_split)
            rollouts = await asyncio.gather(*(attempt(environment, split, index) for index in range(count)))
            failed = [rollout for rollout in rollouts if rollout.error]
            if failed:
                raise EvaluationError(
                    f"{len(failed)} of {count} held-out rollouts of {environment.name}/{split} failed, "
                    f"the first with: {failed[0].error}"
                )
            rates[f"eval/pass_rate/{environment.name}/{split}"] = Rate(sum(map(passed, rollouts)), count)
    return rates
