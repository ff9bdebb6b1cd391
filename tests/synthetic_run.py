"""Writes run folders that look like an SFT and an RL run, through the project's own writers; for tests of readers.

Load it with runpy.run_path: the tests are no package.
"""

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.telemetry.rollouts import RolloutLog, TokenRecord
from megatron_rl.telemetry.sinks import MetricsWriter
from megatron_rl.telemetry.values import Last, Max, Mean, Rate

NASTY_TOKENS = ["</script>", "<script>", "<b>", "&amp;", "\n", "\t", " ", "", "\u2028", "ü", "€", "<!--", "<|im_end|>"]
_PROMPT = "<|im_start|>user\nIn der Bäckerei kosten 3 Brötchen je 0,45 €. Was zahlt Frau Özil?<|im_end|>\n"
_ANSWER = '<|im_start|>assistant\nSie zahlt <tool_call> {"menge": 3, "preis": 0.45} </tool_call> also 1,35 €.<|im_end|>'


def write_sft_run(run_dir: Path, *, steps: int = 40, seed: int = 0) -> Path:
    """metrics.jsonl and config.yaml of an SFT run."""
    noise = random.Random(seed)
    writer = MetricsWriter(run_dir, tensorboard=False)
    for step in range(1, steps + 1):
        loss = 0.4 + 3 * math.exp(-step / 9) + noise.gauss(0, 0.03)
        metrics = {
            "loss/sft": Mean(loss * 900, 900),
            "grad_norm": Last(0.5 + 2 * math.exp(-step / 12) + abs(noise.gauss(0, 0.1))),
            "learning_rate": Last(1e-3 * min(1, step / 5)),
            "tokens/trained": Last(900 + noise.randrange(60)),
            "perf/step_s": Last(0.9 + noise.random() / 10),
            "perf/tokens_per_s": Last(4200 + noise.randrange(300)),
        }
        if step % 10 == 0:
            metrics["loss/heldout"] = Mean((loss + 0.05) * 500, 500)
        writer.write(step, metrics, phase="sft")
    (run_dir / "config.yaml").write_text("run:\n  dir: sft\nmodel:\n  path: a & b <c>\n", encoding="utf-8")
    return run_dir


def write_rl_run(run_dir: Path, *, steps: int = 24, seed: int = 0, rollouts_per_step: int = 16) -> Path:
    """metrics.jsonl, rollouts.jsonl, config.yaml and summary.json of an RL run with two held-out splits."""
    noise = random.Random(seed)
    writer, log = MetricsWriter(run_dir, tensorboard=False), RolloutLog(run_dir)
    _evaluate(writer, 0, steps)
    for step in range(1, steps + 1):
        skill = 0.25 + 0.5 * (1 - math.exp(-step / 10))
        passed = sum(noise.random() < skill for _ in range(128))
        writer.write(
            step,
            {
                "reward/mean": Mean(passed * 0.95 + noise.random(), 128),
                "pass_rate/train": Rate(passed, 128),
                "rollout/length_mean": Mean(128 * (38 - step / 3 + noise.gauss(0, 1)), 128),
                "rollout/length_max": Max(64),
                "log_ratio/abs_mean": Mean(1.3e-5 * (1 + noise.random()), 1),
                "log_ratio/abs_max": Max(4e-4 * (1 + noise.random())),
                "ratio/mean": Mean(1 + noise.gauss(0, 2e-5), 1),
                "mask/share": Mean(noise.random() * 0.01, 1),
                "gradient_scale/mean": Mean(0.998, 1),
                "entropy": Mean(0.9 - step / 60, 1),
                "loss/total": Mean(noise.gauss(0, 0.02), 1),
                "loss/policy": Mean(noise.gauss(0, 0.02), 1),
                "loss/regulariser": Mean(1e-9, 1),
                "grad_norm": Last(math.nan if step == 7 else 0.3 + noise.random() / 5),
                "learning_rate": Last(2e-4 * min(1, step / 5)),
                "groups/kept": Last(12 + noise.randrange(4)),
                "groups/drawn": Last(16),
                "groups/dropped/no_spread": Last(noise.randrange(4)),
                "weights/publish_s": Last(0.12),
                "weights/probe_max_error": Last(1e-6 * (1 + noise.random())),
                "perf/rollout_s": Last(6 + noise.random()),
                "perf/step_s": Last(8 + noise.random()),
                "perf/tokens_per_s": Last(900 + noise.randrange(80)),
                "signal/tool_well_formed": Mean(90 + noise.randrange(10), 100),
                "a/metric/nobody/knows": Last(step),
            },
            phase="rl",
        )
        log.write(step, rollout_records(step, rollouts_per_step, skill=skill, noise=noise))
        if step == steps:
            _evaluate(writer, step, steps)
    (run_dir / "config.yaml").write_text("run:\n  dir: rl\nloss:\n  policy:\n    eps_low: 0.2\n", encoding="utf-8")
    rows = [
        {"name": name, "split": split, "rate": rate, "low": rate - 0.05, "high": rate + 0.05, "n": 256}
        for split, rates in {"new_texts": (0.06, 0.31, 0.74), "new_numbers": (0.05, 0.22, 0.61)}.items()
        for name, rate in zip(("before SFT", "after SFT", "after RL"), rates, strict=True)
    ]
    (run_dir / "summary.json").write_text(json.dumps(rows), encoding="utf-8")
    return run_dir


def rollout_records(step: int, count: int, *, skill: float, noise: random.Random) -> Sequence[TokenRecord]:
    """Groups of eight attempts; a few tokens masked, one without an engine log-prob, ratios wider with every step."""
    records = []
    for index in range(count):
        group = f"baker/train/{step * 100 + index // 8}"
        answer = _ANSWER.split(" ") + (NASTY_TOKENS if index % 8 == 0 else [])
        tokens = [f"{word} " for word in _PROMPT.split(" ")] + [
            word if word in NASTY_TOKENS else f"{word} " for word in answer
        ]
        trained = [False] * (len(tokens) - len(answer)) + [True] * len(answer)
        engine = [math.log(0.02 + 0.97 * noise.random()) if t else None for t in trained]
        policy = [None if e is None else min(-1e-6, e + noise.gauss(0, 0.004 * step)) for e in engine]
        if index == 1:
            engine[-1] = None
        reward = float(noise.random() < skill)
        records.append(
            TokenRecord(
                step=step,
                sample_id=f"{group}#{index % 8}",
                group_id=group,
                environment="baker" if index < 8 else "reasoning_gym/sum",
                reward=reward,
                advantage=reward - skill,
                tokens=tokens,
                trained=trained,
                engine_logp=engine,
                policy_logp=policy,
                kept=[not t or noise.random() > 0.04 for t in trained],
                gradient_scale=[1.0 if noise.random() > 0.1 else 0.7 for _ in trained],
                weight_version=[step - 1 if t else -1 for t in trained],
            )
        )
    return records


def _evaluate(writer: MetricsWriter, step: int, steps: int) -> None:
    gain = step / steps
    writer.write(
        step,
        {
            "eval/pass_rate/baker/new_texts": Rate(round(256 * (0.31 + 0.43 * gain)), 256),
            "eval/pass_rate/baker/new_numbers": Rate(round(256 * (0.22 + 0.39 * gain)), 256),
        },
        phase="rl",
    )
