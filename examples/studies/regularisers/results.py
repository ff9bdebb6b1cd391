"""Run folders -> numbers per run -> Markdown. Reads metrics.jsonl only."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from settings import SETTINGS

from megatron_rl.telemetry.sinks import read_metrics

PLACE = "baker/new_texts"
"""Environment and split of the held-out numbers."""
LAST_STEPS = 5
"""Training metrics of the table are means over so many last steps."""
CURVES = {"reward": "reward/mean", "entropy": "entropy", "KL to the start": "kl/reference_k3"}
"""Title -> training metric."""
_HELD_OUT = {
    "pass@1": f"eval/pass_rate/{PLACE}",
    "pass@8": f"eval/pass_at/8/{PLACE}",
    "distinct of 8": f"eval/distinct_answers/{PLACE}",
    "entropy": f"eval/entropy_estimate/{PLACE}",
}
MEASURES = {
    "pass@1": ".3f",
    "pass@8": ".3f",
    "distinct of 8": ".2f",
    "entropy": ".3f",
    "KL to the start": ".4f",
    "reward": ".3f",
}
"""Columns of the table, and how their numbers are written."""


@dataclass(frozen=True)
class RunResult:
    """One finished run."""

    setting: str
    seed: int
    start: dict[str, float]
    """Held-out measures before the first step."""
    end: dict[str, float]
    """Every measure after the last step; one that was not recorded is absent."""
    curves: dict[str, list[tuple[int, float]]]
    seconds: float
    """Wall-clock time from the first record to the last."""


def run_folder(study: Path, setting: str, seed: int) -> Path:
    """Where one run lives."""
    return study / f"{setting}-seed{seed}"


def is_finished(run_dir: Path, steps: int) -> bool:
    """Whether the evaluation after the last step was recorded."""
    return any(record["step"] == steps and _HELD_OUT["pass@1"] in record for record in read_metrics(run_dir))


def read_run(run_dir: Path, setting: str, seed: int) -> RunResult:
    """The numbers of a finished run."""
    records = read_metrics(run_dir)
    evaluations = [record for record in records if _HELD_OUT["pass@1"] in record]
    curves = {title: _curve(records, metric) for title, metric in CURVES.items()}
    end = _held_out(evaluations[-1])
    for title in ("KL to the start", "reward"):
        if curves[title]:
            end[title] = statistics.fmean(value for _, value in curves[title][-LAST_STEPS:])
    return RunResult(
        setting=setting,
        seed=seed,
        start=_held_out(evaluations[0]),
        end=end,
        curves={title: curve for title, curve in curves.items() if curve},
        seconds=records[-1]["time"] - records[0]["time"],
    )


def read_study(study: Path, *, steps: int) -> dict[str, list[RunResult]]:
    """Finished runs by setting, in the order of SETTINGS, by seed; settings without one are left out."""
    results: dict[str, list[RunResult]] = {}
    for setting in SETTINGS:
        for run_dir in sorted(study.glob(f"{setting}-seed*")):
            if is_finished(run_dir, steps):
                seed = int(run_dir.name.removeprefix(f"{setting}-seed"))
                results.setdefault(setting, []).append(read_run(run_dir, setting, seed))
    return {setting: sorted(runs, key=lambda run: run.seed) for setting, runs in results.items()}


def markdown_table(results: Mapping[str, Sequence[RunResult]]) -> str:
    """One row per setting, mean over seeds (least to greatest); the first row is the model all runs start from."""
    everything = [run for runs in results.values() for run in runs]
    lines = [f"| | seeds | {' | '.join(MEASURES)} |", "|---|---" + "|---:" * len(MEASURES) + "|"]
    lines.append(_row("start", "", [run.start for run in everything]))
    for setting, runs in results.items():
        lines.append(_row(SETTINGS[setting].label, str(len(runs)), [run.end for run in runs]))
    return "\n".join(lines)


def _row(label: str, count: str, runs: Sequence[Mapping[str, float]]) -> str:
    cells = [_spread([run[measure] for run in runs if measure in run], style) for measure, style in MEASURES.items()]
    return f"| {label} | {count} | {' | '.join(cells)} |"


def _spread(values: Sequence[float], style: str) -> str:
    if not values:
        return "–"
    mean = format(statistics.fmean(values), style)
    return mean if len(values) == 1 else f"{mean} ({min(values):{style}}–{max(values):{style}})"


def _held_out(record: Mapping[str, Any]) -> dict[str, float]:
    return {title: record[name] for title, name in _HELD_OUT.items() if record.get(name) is not None}


def _curve(records: Sequence[Mapping[str, Any]], metric: str) -> list[tuple[int, float]]:
    return [(record["step"], record[metric]) for record in records if record.get(metric) is not None]
