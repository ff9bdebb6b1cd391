"""The study of regularisers: one RL run per setting and seed, one after the other, then a table and a figure.

    .venv/bin/python examples/studies/regularisers/run.py run      every run; finished ones are skipped
    .venv/bin/python examples/studies/regularisers/run.py table    docs/regularisers.md and docs/regularisers.svg

Run from the root of the repository. A stopped run goes on from its checkpoint when the same command is given again.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import yaml
from figure import figure_svg
from results import is_finished, markdown_table, read_study, run_folder
from settings import SETTINGS

from megatron_rl.cli.launch import run_rl, run_sft
from megatron_rl.cli.preflight import changed_keys
from megatron_rl.cli.runs import CONFIG_FILE, RlRun, SftRun
from megatron_rl.cli.supervisor import RunFailed, RunStopped
from megatron_rl.cli.tiny import make_tiny
from megatron_rl.cli.user_errors import run_with_user_errors
from megatron_rl.config import ConfigError
from megatron_rl.config.load import dump_config, load_config
from megatron_rl.telemetry.progress import clock

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
COMMAND = "python examples/studies/regularisers/run.py"
SEEDS = (0, 1, 2)
_BEGIN, _END = f"<!-- measured by: {COMMAND} table -->", "<!-- end of measurements -->"
_MAY_CHANGE = ("trainer.steps", "trainer.eval_every_steps", "trainer.checkpoint.every_steps")
"""Keys in which a longer study differs from the shorter one that it goes on from."""


def make_start(folder: Path) -> Path:
    """The quickstart's tiny model after the quickstart's SFT, seed 0, made if it is not there. Its HF folder."""
    tiny, sft = folder / "tiny", folder / "sft"
    if (sft / "hf").exists():
        return sft / "hf"
    print(f"start  a tiny Qwen3-MoE and its SFT -> {sft}", flush=True)
    if not (tiny / "done").exists():
        make_tiny(tiny, seed=0)
        (tiny / "done").touch()
    values = {
        "run.dir": str(sft),
        "model.path": str(tiny / "model"),
        "data.train": [str(tiny / "train.jsonl")],
        "data.heldout": [str(tiny / "heldout.jsonl")],
    }
    run_sft(load_config(ROOT / "examples" / "sft" / "tiny_cpu.yaml", SftRun, overrides(values)))
    return sft / "hf"


def study_run(study: Path, setting: str, seed: int, *, start: Path, steps: int | None) -> RlRun:
    """The config of one run; steps None: as in config.yaml."""
    values: dict[str, Any] = {
        "run.dir": str(run_folder(study, setting, seed)),
        "run.seed": seed,
        "model.path": str(start),
        **SETTINGS[setting].changes,
    }
    if steps is not None:
        values |= {"trainer.steps": steps, "trainer.eval_every_steps": steps, "trainer.checkpoint.every_steps": steps}
    return load_config(HERE / "config.yaml", RlRun, overrides(values))


def overrides(values: Mapping[str, Any]) -> list[str]:
    """key=value for each; JSON is YAML that needs no further quoting."""
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]


def run_study(
    study: Path, settings: Sequence[str], seeds: Sequence[int], *, steps: int | None, start: Path | None
) -> dict[str, str]:
    """Every run that is not finished; seed by seed, so that a study which is stopped early is even.

    A run that fails is reported and the others go on. Returns what failed, by run folder.
    """
    start = start or make_start(study / "start")
    jobs = [study_run(study, setting, seed, start=start, steps=steps) for seed in seeds for setting in settings]
    for job in jobs:
        check_same_settings(job)
    waiting = [job for job in jobs if not is_finished(job.run.folder, job.trainer.steps)]
    print(f"study  {len(jobs)} runs, {len(jobs) - len(waiting)} finished before", flush=True)
    failures: dict[str, str] = {}
    began = time.monotonic()
    for number, job in enumerate(waiting):
        left = clock((time.monotonic() - began) / number * (len(waiting) - number)) if number else "unknown"
        print(f"study  run {number + 1} of {len(waiting)}: {job.run.folder.name}, time left {left}", flush=True)
        try:
            run_rl(job)
        except RunFailed as failure:
            failures[job.run.dir] = str(failure)
            print(f"study  {job.run.folder.name} failed: {failure}", file=sys.stderr, flush=True)
    return failures


def check_same_settings(job: RlRun) -> None:
    """ConfigError if the folder holds a run with other settings; more steps are not other settings."""
    path = job.run.folder / CONFIG_FILE
    if not path.exists():
        return
    old, new = (yaml.safe_load(text) for text in (path.read_text(encoding="utf-8"), dump_config(job)))
    changed = [key for key in changed_keys(old, new) if key not in _MAY_CHANGE]
    if changed:
        raise ConfigError(
            f"a study's run keeps its settings, but {job.run.dir} was started with other values of "
            f"{', '.join(changed)}; remove it, or choose another --folder"
        )


def write_page(study: Path, page: Path, *, steps: int | None) -> None:
    """The table and the figure of the finished runs between the page's two marks; a new page has the words of page.md.

    ConfigError without a finished run.
    """
    # Any setting tells how long the runs are.
    wanted = study_run(study, next(iter(SETTINGS)), SEEDS[0], start=study / "start" / "sft" / "hf", steps=steps)
    results = read_study(study, steps=wanted.trainer.steps)
    if not results:
        raise ConfigError(f"a table needs a finished run, found none below {study}; first: {COMMAND} run")
    figure = page.with_suffix(".svg")
    page.parent.mkdir(parents=True, exist_ok=True)
    figure.write_text(figure_svg(results), encoding="utf-8")
    text = (page if page.exists() else HERE / "page.md").read_text(encoding="utf-8")
    before, _, rest = text.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    seconds = [run.seconds for runs in results.values() for run in runs]
    made_by = (
        f"{machine()}; {len(seconds)} runs of {wanted.trainer.steps} steps, {statistics.median(seconds):.0f} seconds "
        f"each (median, without starting engine and trainer). `{COMMAND} run`, then `{COMMAND} table`."
    )
    parts = [made_by, markdown_table(results), f"![Curves of reward, entropy and KL]({figure.name})"]
    page.write_text(f"{before}{_BEGIN}\n\n" + "\n\n".join(parts) + f"\n\n{_END}{after}", encoding="utf-8")


def machine() -> str:
    """Kind of this machine, in a few words."""
    memory_gib = psutil.virtual_memory().total / 2**30
    return f"{os.cpu_count()} {platform.machine()} CPU cores, {memory_gib:.0f} GiB, no GPU used"


def main() -> None:
    """Exit status 1 if a run failed."""
    options = parse(sys.argv[1:])
    if options.verb == "table":
        write_page(options.folder, options.page, steps=options.steps)
        print(f"{options.page} and {options.page.with_suffix('.svg')}: now write down what is seen")
        return
    failures = run_study(options.folder, options.settings, options.seeds, steps=options.steps, start=options.start)
    if failures:
        print(f"study  {len(failures)} runs failed: {', '.join(failures)}; the same command tries them again")
        sys.exit(1)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Verb and options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    run, table = verbs.add_parser("run", help="train"), verbs.add_parser("table", help="write table and figure")
    for verb in (run, table):
        verb.add_argument("--folder", type=Path, default=Path("runs/regularisers"), help="folder of all runs")
        verb.add_argument("--steps", type=_positive, help="optimizer steps; default: trainer.steps of config.yaml")
    run.add_argument("--settings", type=_names, default=list(SETTINGS), help=f"of {', '.join(SETTINGS)}; default: all")
    run.add_argument("--seeds", type=_numbers, default=list(SEEDS), help="default: 0,1,2")
    run.add_argument("--start", type=Path, help="Hugging Face folder to start from; default: made here")
    table.add_argument("--page", type=Path, default=ROOT / "docs" / "regularisers.md", help="Markdown file to write")
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 on, got {text}")
    return int(text)


def _names(text: str) -> list[str]:
    unknown = [name for name in text.split(",") if name not in SETTINGS]
    if unknown:
        raise argparse.ArgumentTypeError(f"must be of {', '.join(SETTINGS)}, got {', '.join(unknown)}")
    return text.split(",")


def _numbers(text: str) -> list[int]:
    wrong = [part for part in text.split(",") if not part.isdecimal()]
    if wrong:
        raise argparse.ArgumentTypeError(f"must be whole numbers such as 0,1,2, got {', '.join(wrong)}")
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    try:
        sys.exit(run_with_user_errors(main))
    except RunStopped as stop:
        print(stop.message, file=sys.stderr, flush=True)
        raise
