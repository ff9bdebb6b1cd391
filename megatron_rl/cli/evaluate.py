"""The evaluating process of megatron-rl eval: python -m megatron_rl.cli.evaluate CONFIG OUT [key=value ...]."""

import asyncio
import json
import math
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_rl.cli.orchestrate import engine_pool
from megatron_rl.cli.runs import RlRun
from megatron_rl.cli.user_errors import run_with_user_errors
from megatron_rl.config.load import load_config
from megatron_rl.data.render import ChatRenderer, load_tokenizer
from megatron_rl.orchestrator.evaluate import HeldOut, evaluate_policy
from megatron_rl.rollout.environments import make_environment
from megatron_rl.telemetry.values import Rate


async def evaluate(run: RlRun) -> list[HeldOut]:
    """What the model that the engines hold does on every held-out split."""
    pool = engine_pool(run)
    try:
        return await evaluate_policy(
            [make_environment(config) for config in run.environments],
            pool,
            ChatRenderer(load_tokenizer(run.model.path)),
            run.rollout,
            evaluation=run.orchestrator.evaluation,
            max_concurrent=run.orchestrator.max_concurrent_rollouts,
        )
    finally:
        await pool.close()


def eval_rows(results: Iterable[HeldOut]) -> list[dict[str, Any]]:
    """Per environment and split {environment, split, rate, low, high, n}, and every other measure by name."""
    rows = []
    for result in results:
        rate = result.measures["pass_rate"]
        assert isinstance(rate, Rate), f"a pass rate is a Rate, got {type(rate).__name__}"
        low, high = rate.interval()
        row = {"environment": result.environment, "split": result.split}
        row |= {"rate": rate.result(), "low": low, "high": high, "n": rate.count}
        others = {name: value.result() for name, value in result.measures.items() if name != "pass_rate"}
        rows.append(row | {name: value if math.isfinite(value) else None for name, value in others.items()})
    return rows


def main(arguments: list[str]) -> None:
    """Writes OUT: a JSON list of eval_rows."""
    run = load_config(arguments[0], RlRun, arguments[2:])
    rows = eval_rows(asyncio.run(evaluate(run)))
    out = Path(arguments[1])
    partial = out.with_name(f"{out.name}.{os.getpid()}.tmp")
    partial.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    partial.replace(out)


if __name__ == "__main__":
    sys.exit(run_with_user_errors(lambda: main(sys.argv[1:])))
