"""rollouts.jsonl -> the rollouts that the page holds: few enough to open at once; the page says what was left out."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_rl.telemetry.report_curves import short
from megatron_rl.telemetry.rollouts import TokenRecord, read_rollout_heads, read_rollouts

MAX_STEPS = 30
MAX_ROLLOUTS_PER_STEP = 24
MAX_TOKENS = 90_000
"""On the whole page, over all runs and steps."""
MAX_PROMPT_TOKENS = 600
MAX_ANSWER_TOKENS = 1500


def choose_rollouts(run_dirs: Sequence[Path]) -> list[dict[str, Any]]:
    """One entry per run that logged rollouts: {"run", "num_logged", "num_steps_logged", "num_shown", "steps"}."""
    chosen = []
    per_run = []
    for run, run_dir in enumerate(run_dirs):
        lines_of_step: dict[int, list[int]] = {}
        for line, head in read_rollout_heads(run_dir):
            lines_of_step.setdefault(head.step, []).append(line)
        if lines_of_step:
            per_run.append((run, run_dir, lines_of_step))
    num_steps = sum(min(MAX_STEPS, len(lines)) for _, _, lines in per_run)
    for run, run_dir, lines_of_step in per_run:
        shown_steps = evenly_spaced(sorted(lines_of_step), MAX_STEPS)
        lines = {line for step in shown_steps for line in lines_of_step[step][:MAX_ROLLOUTS_PER_STEP]}
        records: dict[int, list[TokenRecord]] = {step: [] for step in shown_steps}
        for record in read_rollouts(run_dir, lines):
            records[record.step].append(record)
        steps = [_step(step, records[step], MAX_TOKENS // num_steps) for step in shown_steps]
        chosen.append(
            {
                "run": run,
                "num_logged": sum(map(len, lines_of_step.values())),
                "num_steps_logged": len(lines_of_step),
                "num_shown": sum(len(group["items"]) for step in steps for group in step["groups"]),
                "steps": steps,
            }
        )
    return chosen


def evenly_spaced(steps: Sequence[int], limit: int) -> list[int]:
    """At most limit of the steps, first and last among them."""
    if len(steps) <= limit:
        return list(steps)
    return [steps[round(i * (len(steps) - 1) / (limit - 1))] for i in range(limit)]


def _step(step: int, records: Sequence[TokenRecord], token_budget: int) -> dict[str, Any]:
    """The step's first rollouts within the budget, one at least, by group; a shared prompt is there once."""
    groups: dict[tuple[str, tuple[str, ...]], dict[str, Any]] = {}
    spent = 0
    for record in records:
        start = record.trained.index(True) if True in record.trained else len(record.tokens)
        prompt = record.tokens[:start][-MAX_PROMPT_TOKENS:]
        key = (record.group_id, tuple(prompt))
        item = _item(record, start)
        cost = len(item["tokens"]) + (0 if key in groups else len(prompt))
        if spent and spent + cost > token_budget:
            continue
        spent += cost
        group = groups.setdefault(
            key,
            {
                "id": record.group_id,
                "environment": record.environment,
                "prompt": prompt,
                "prompt_cut": start - len(prompt),
                "items": [],
            },
        )
        group["items"].append(item)
    return {"step": step, "groups": list(groups.values())}


def _item(record: TokenRecord, start: int) -> dict[str, Any]:
    """One rollout after its prompt. Lists are per token of `tokens`; numbers only where the token is trained."""
    end = min(len(record.tokens), start + MAX_ANSWER_TOKENS)
    span = range(start, end)
    trained = [t for t in span if record.trained[t]]
    return {
        "id": record.sample_id,
        "reward": short(record.reward),
        "advantage": short(record.advantage),
        "tokens": record.tokens[start:end],
        "cut": len(record.tokens) - end,
        "state": "".join(_state(record, t) for t in span),
        "engine": [short(record.engine_logp[t]) for t in trained],
        "log_ratio": [short(_log_ratio(record, t), 4) for t in trained],
        "scale": [short(record.gradient_scale[t], 4) for t in trained],
        "version": [record.weight_version[t] for t in trained],
    }


def _state(record: TokenRecord, t: int) -> str:
    """c: context, not trained; k: trained; m: masked, k = 0; x: left out, engine log-prob missing."""
    if not record.trained[t]:
        return "c"
    if record.engine_logp[t] is None or record.policy_logp[t] is None:
        return "x"
    return "k" if record.kept[t] else "m"


def _log_ratio(record: TokenRecord, t: int) -> float | None:
    policy, engine = record.policy_logp[t], record.engine_logp[t]
    return None if policy is None or engine is None else policy - engine
