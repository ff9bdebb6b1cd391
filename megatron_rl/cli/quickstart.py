"""The README's first command: tiny model, SFT, RL, a table and a page.

Every stage leaves its result in the folder, so a stopped quickstart goes on where it was; a finished one says so.
"""

import json
import time
from importlib import resources
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_rl.cli.launch import run_evaluation, run_rl, run_sft
from megatron_rl.cli.runs import RlRun, SftRun
from megatron_rl.cli.tiny import make_tiny
from megatron_rl.config import ConfigError
from megatron_rl.config.load import load_config
from megatron_rl.telemetry.report import build_report
from megatron_rl.telemetry.sinks import read_metrics

SPLITS = {"new_texts": "new texts, known numbers", "new_numbers": "known texts, new numbers"}


def run_quickstart(folder: Path, *, seed: int) -> None:
    """Runs every stage that the folder does not have yet and prints the table."""
    console = Console()
    started = time.monotonic()
    tiny, sft_dir, rl_dir = folder / "tiny", folder / "sft", folder / "rl"
    _check_seed(tiny / "done", seed)
    if (rl_dir / "hf").exists():
        console.print(f"{folder} is finished; for another run remove it or give another --folder")
    if not (tiny / "done").exists():
        console.print(f"[bold]1/4[/] a tiny Qwen3-MoE, its tokenizer and conversations -> {tiny}")
        make_tiny(tiny, seed=seed)
        (tiny / "done").write_text(f"{seed}\n", encoding="utf-8")
    sft, rl = _configs(folder, seed)
    if not (folder / "before" / "eval.json").exists():
        console.print("[bold]2/4[/] pass rate before SFT: vLLM serves the random model")
        before = rl.model_copy(update={"model": rl.model.model_copy(update={"path": str(tiny / "model")})})
        run_evaluation(before, folder / "before")
    if not (sft_dir / "hf").exists():
        console.print("[bold]3/4[/] SFT: Megatron-Core on this machine's CPU")
        run_sft(sft)
    if not (rl_dir / "hf").exists():
        console.print("[bold]4/4[/] RL: vLLM samples, Megatron-Core trains, NIXL carries the weights")
        run_rl(rl)
    rows = _summary(folder, rl_dir)
    told = [{**row, "split": f"{row['split']}: {SPLITS[row['split']]}"} for row in rows]
    for place in (folder, rl_dir):
        (place / "summary.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    page = build_report([sft_dir, rl_dir], folder / "report.html")
    console.print(_table(rows))
    print(f"took {(time.monotonic() - started) / 60:.1f} minutes")
    print(f"run folder: {rl_dir}\npage:       {page}", flush=True)


def _check_seed(done: Path, seed: int) -> None:
    """ConfigError if the folder belongs to another seed: its stages would not fit together."""
    started_with = done.read_text(encoding="utf-8").strip() if done.exists() else ""
    if started_with not in ("", str(seed)):
        raise ConfigError(
            f"--seed must be {started_with}, with which the quickstart in {done.parent.parent} was started, "
            f"got {seed}; choose another --folder"
        )


def _configs(folder: Path, seed: int) -> tuple[SftRun, RlRun]:
    tiny, examples = folder / "tiny", _examples()
    sft = {
        "run.dir": str(folder / "sft"),
        "run.seed": seed,
        "model.path": str(tiny / "model"),
        "data.train": [str(tiny / "train.jsonl")],
        "data.heldout": [str(tiny / "heldout.jsonl")],
    }
    rl = {"run.dir": str(folder / "rl"), "run.seed": seed, "model.path": str(folder / "sft" / "hf")}
    return (
        load_config(examples / "sft" / "tiny_cpu.yaml", SftRun, _overrides(sft)),
        load_config(examples / "rl" / "tiny_cpu.yaml", RlRun, _overrides(rl)),
    )


def _overrides(values: dict[str, Any]) -> list[str]:
    """key=value for each; JSON is YAML that needs no further quoting."""
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]


def _examples() -> Path:
    """The repository's examples: beside the package in a clone."""
    return Path(str(resources.files("megatron_rl"))).parent / "examples"


def _summary(folder: Path, rl_dir: Path) -> list[dict[str, Any]]:
    """Rows {name, split, rate, low, high, n}: before SFT, after SFT, after RL, for both held-out splits."""
    before = json.loads((folder / "before" / "eval.json").read_text(encoding="utf-8"))
    rows = [{"name": "before SFT", **{k: row[k] for k in ("split", "rate", "low", "high", "n")}} for row in before]
    evaluations = [record for record in read_metrics(rl_dir) if "eval/pass_rate/baker/new_texts" in record]
    for name, record in (("after SFT", evaluations[0]), ("after RL", evaluations[-1])):
        for split in SPLITS:
            key = f"eval/pass_rate/baker/{split}"
            rows.append(
                {
                    "name": name,
                    "split": split,
                    "rate": record[key],
                    "low": record[f"{key}/low"],
                    "high": record[f"{key}/high"],
                    "n": record[f"{key}/n"],
                }
            )
    return rows


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="Held-out pass rate at temperature 1 (95% interval)")
    table.add_column("")
    for split, meaning in SPLITS.items():
        table.add_column(f"{split}: {meaning}", justify="right")
    for name in dict.fromkeys(row["name"] for row in rows):
        cells = {row["split"]: row for row in rows if row["name"] == name}
        table.add_row(
            name, *(f"{cells[s]['rate']:.3f}  ({cells[s]['low']:.3f}-{cells[s]['high']:.3f})" for s in SPLITS)
        )
    return table
