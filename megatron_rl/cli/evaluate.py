"""The evaluating process of megatron-rl eval: python -m megatron_rl.cli.evaluate CONFIG OUT [key=value ...]."""

import asyncio
import json
import os
import sys
from pathlib import Path

from megatron_rl.cli.orchestrate import engine_pool
from megatron_rl.cli.runs import RlRun
from megatron_rl.cli.user_errors import run_with_user_errors
from megatron_rl.config.load import load_config
from megatron_rl.data.render import ChatRenderer, load_tokenizer
from megatron_rl.orchestrator.evaluate import pass_rates
from megatron_rl.rollout.environments import make_environment
from megatron_rl.telemetry.values import Rate


async def evaluate(run: RlRun) -> dict[str, Rate]:
    """Pass rates of the model the engines hold, on every held-out split."""
    pool = engine_pool(run)
    try:
        return await pass_rates(
            [make_environment(config) for config in run.environments],
            pool,
            ChatRenderer(load_tokenizer(run.model.path)),
            run.rollout,
            prompts_per_split=run.orchestrator.evaluation.prompts_per_split,
            max_concurrent=run.orchestrator.max_concurrent_rollouts,
        )
    finally:
        await pool.close()


def main(arguments: list[str]) -> None:
    """Writes OUT: a JSON list of {environment, split, rate, low, high, n}."""
    run = load_config(arguments[0], RlRun, arguments[2:])
    rows = []
    for name, rate in asyncio.run(evaluate(run)).items():
        environment, split = name.removeprefix("eval/pass_rate/").rsplit("/", 1)
        low, high = rate.interval()
        rows.append(
            {
                "environment": environment,
                "split": split,
                "rate": rate.result(),
                "low": low,
                "high": high,
                "n": rate.count,
            }
        )
    out = Path(arguments[1])
    partial = out.with_name(f"{out.name}.{os.getpid()}.tmp")
    partial.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    partial.replace(out)


if __name__ == "__main__":
    sys.exit(run_with_user_errors(lambda: main(sys.argv[1:])))
