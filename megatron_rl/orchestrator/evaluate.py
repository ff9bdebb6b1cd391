"""What the policy does on held-out prompts: pass rates, and how varied, undecided and long its answers are."""

import asyncio
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron_rl.config import RunError
from megatron_rl.data.render import ChatRenderer
from megatron_rl.orchestrator.attempts import pass_at_k, rate_over_prompts
from megatron_rl.orchestrator.config import EvaluationConfig
from megatron_rl.records import Rollout
from megatron_rl.rollout.env import Environment
from megatron_rl.rollout.run import Generator, RolloutConfig, run_rollout
from megatron_rl.telemetry.values import Mean, Rate


class EvaluationError(RunError):
    """Held-out rollouts failed for reasons outside the model; their pass rate would mean nothing."""


def passed(rollout: Rollout) -> bool:
    """An attempt passes when its last segment earned the whole reward."""
    return rollout.rewards[-1] >= 1.0 - 1e-9


def was_cut(rollout: Rollout) -> bool:
    """Whether a turn was cut off, or no room was left for another one."""
    return rollout.finish_reason in ("length", "context")


@dataclass(frozen=True)
class HeldOut:
    """What was measured on one held-out split."""

    environment: str
    split: str
    measures: dict[str, Rate | Mean]
    """pass_rate, pass_at/K, entropy_estimate, length_mean, cut_share, and distinct_answers with several attempts."""


def metrics_of(results: Iterable[HeldOut]) -> dict[str, Rate | Mean]:
    """eval/MEASURE/ENVIRONMENT/SPLIT -> value."""
    return {
        f"eval/{measure}/{result.environment}/{result.split}": value
        for result in results
        for measure, value in result.measures.items()
    }


async def evaluate_policy(
    environments: Sequence[Environment],
    generator: Generator,
    renderer: ChatRenderer,
    rollout: RolloutConfig,
    *,
    evaluation: EvaluationConfig,
    max_concurrent: int,
) -> list[HeldOut]:
    """Attempts at the first prompts of every split but train. EvaluationError if any rollout failed."""
    gate = asyncio.Semaphore(max_concurrent)
    if evaluation.temperature is not None:
        rollout = rollout.model_copy(update={"temperature": evaluation.temperature})

    async def attempt(environment: Environment, split: str, prompt: int, number: int) -> Rollout:
        async with gate:
            return await run_rollout(
                environment.prompt(split, prompt), environment, generator, renderer, rollout, index=number
            )

    results = []
    tries = evaluation.attempts_per_prompt
    for environment in environments:
        for split in environment.splits:
            if split == "train":
                continue
            size = environment.size(split)
            prompts = range(evaluation.prompts_per_split if size is None else min(size, evaluation.prompts_per_split))
            rollouts = await asyncio.gather(
                *(attempt(environment, split, prompt, number) for prompt in prompts for number in range(tries))
            )
            _check_all_ran(rollouts, f"{environment.name}/{split}")
            of_prompt = [rollouts[prompt * tries : (prompt + 1) * tries] for prompt in prompts]
            measures = _pass_rates(of_prompt, evaluation) | _answers(of_prompt)
            results.append(HeldOut(environment.name, split, measures))
    return results


def _check_all_ran(rollouts: Sequence[Rollout], place: str) -> None:
    failed = [rollout for rollout in rollouts if rollout.error]
    if failed:
        raise EvaluationError(
            f"{len(failed)} of {len(rollouts)} held-out rollouts of {place} failed, the first with: {failed[0].error}"
        )


def _pass_rates(of_prompt: Sequence[Sequence[Rollout]], evaluation: EvaluationConfig) -> dict[str, Rate | Mean]:
    """pass_rate is pass@1 over all attempts; the others are means over prompts of the unbiased estimator."""
    tries = evaluation.attempts_per_prompt
    counts = [sum(map(passed, attempts)) for attempts in of_prompt]
    names = {1: "pass_rate"} | {k: f"pass_at/{k}" for k in evaluation.pass_at if k > 1}
    return {
        name: rate_over_prompts([pass_at_k(tries, count, k) for count in counts], trials=tries // k)
        for k, name in names.items()
    }


def _answers(of_prompt: Sequence[Sequence[Rollout]]) -> dict[str, Rate | Mean]:
    """How undecided, long and, where there are several attempts, varied the answers are; the share that was cut off.

    entropy_estimate is the mean of -log p over sampled tokens at the sampling temperature: without bias the entropy
    of the sampling distribution, averaged over the contexts that sampling visits; one token's spread is that of log p.
    """
    rollouts = [rollout for attempts in of_prompt for rollout in attempts]
    logp = [logp for r in rollouts for s in r.segments for logp in s.engine_logp[s.sampled].tolist()]
    known = [one for one in logp if math.isfinite(one)]
    measured: dict[str, Rate | Mean] = {
        "entropy_estimate": Mean(-math.fsum(known), len(known)),
        "length_mean": Mean(len(logp), len(rollouts)),
        "cut_share": Mean(sum(map(was_cut, rollouts)), len(rollouts)),
    }
    if len(rollouts) > len(of_prompt):
        distinct = [len(set(map(_final_answer, attempts))) for attempts in of_prompt]
        measured["distinct_answers"] = Mean(sum(distinct), len(distinct))
    return measured


def _final_answer(rollout: Rollout) -> str:
    """Text of the last assistant turn; the environment may have answered it."""
    return next(message["content"] for message in reversed(rollout.messages) if message["role"] == "assistant")
