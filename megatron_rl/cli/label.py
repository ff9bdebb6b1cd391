"""megatron-rl label: effort labels for files of conversations, and a report of how they came out."""

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from megatron_rl.cli.output_folder import check_folder, writing
from megatron_rl.config import ConfigError
from megatron_rl.config.load import load_config
from megatron_rl.data.conversation import EFFORTS
from megatron_rl.data.difficulty import (
    UNGRADED,
    ColumnDifficulty,
    Difficulty,
    GradedDifficulty,
    GraderConfig,
    NoDifficulty,
    grade,
    open_grades,
)
from megatron_rl.data.effort import MIN_TRACES
from megatron_rl.data.effort_groups import Group
from megatron_rl.data.label import Dataset, LabelReport, conversations, label, open_datasets
from megatron_rl.data.render import load_tokenizer

_ORIGINS = {"group": "group", "dataset": "dataset", "few": "dataset, few", "none": "–"}
_CAPTION = (
    "l30, l70: percentiles of the reasoning's tokens, taken from the group, or from its dataset where the group has "
    f"fewer than {MIN_TRACES} rows with reasoning; few: the dataset has fewer, too. low, medium, high: shares of the "
    "rows with reasoning."
)


def label_files(
    model: Path, data: Sequence[str], out: Path, *, column: str | None, grader: Path | None, seed: int
) -> LabelReport:
    """Writes out/NAME.jsonl and out.report.json, and prints the report's table.

    A grader's answers are kept in out.grades.jsonl, from where a stopped command goes on. ConfigError for options that
    do not fit, DataError for a row that does not, RunError if a grader's endpoint failed.
    """
    if column is not None and grader is not None:
        raise ConfigError("--difficulty-column and --grader exclude each other, got both; leave one out")
    report_path = out.with_name(f"{out.name}.report.json")
    for path in (out, report_path):
        if path.exists():
            raise ConfigError(f"{path} must not exist yet; remove it or choose another --out")
    if not model.is_dir():
        raise ConfigError(f"MODEL must be a Hugging Face folder, got {model}; give one with a tokenizer")
    config = None if grader is None else load_config(grader, GraderConfig)
    datasets = open_datasets(data)
    check_folder(out.parent, "the folder of --out")
    tokenizer = load_tokenizer(model)
    with writing(out.parent), _levels(column, config, datasets, out) as difficulty, _bar() as bar:
        on_row = _on_row(bar, sum(map(len, datasets)))
        report = label(datasets, out, tokenizer=tokenizer, difficulty=difficulty, seed=seed, on_row=on_row)
        report_path.write_text(json.dumps(report.as_json(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    console = Console()
    console.print(_table(report))
    for note in _notes(report):
        console.print(f"note: {note}", markup=False)
    return report


@contextmanager
def _levels(
    column: str | None, grader: GraderConfig | None, datasets: Sequence[Dataset], out: Path
) -> Iterator[Difficulty]:
    """Where levels come from, after a grader has graded every row."""
    if grader is None:
        yield NoDifficulty() if column is None else ColumnDifficulty(column)
        return
    with closing(open_grades(out.with_name(f"{out.name}.grades.jsonl"), grader)) as journal:
        tasks = (conversation for dataset in datasets for _, conversation in conversations(dataset))
        with _bar() as bar:
            task = bar.add_task("grades", total=sum(map(len, datasets)))
            asyncio.run(
                grade(tasks, grader, journal, on_progress=lambda counts: bar.update(task, completed=counts.seen))
            )
        yield GradedDifficulty(journal)


def _bar() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _on_row(bar: Progress, num_rows: int) -> Callable[[str], None]:
    tasks = {phase: bar.add_task(phase, total=num_rows) for phase in ("lengths", "labels")}
    return lambda phase: bar.advance(tasks[phase])


def _table(report: LabelReport) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, caption=_CAPTION, caption_justify="left")
    for name in ("dataset", "difficulty"):
        table.add_column(name)
    for name in ("rows", "l30", "l70", *EFFORTS):
        table.add_column(name, justify="right")
    table.add_column("from")
    for group in report.groups:
        table.add_row(*_cells(group))
    totals = report.as_json()
    table.add_section()
    table.add_row("all", "", str(totals["rows"]), "", "", *_split(totals["labels"]), "")
    return table


def _cells(group: Group) -> list[str]:
    edges = [f"{group.thresholds.l30:.1f}", f"{group.thresholds.l70:.1f}"] if group.thresholds else ["–", "–"]
    name = group.difficulty or "–"
    return [group.dataset, name, str(group.rows), *edges, *_split(group.counts), _ORIGINS[group.origin]]


def _split(counts: Mapping[str, int]) -> list[str]:
    """How many rows are labelled none, then the shares of the other labels among the rest."""
    num_traces = sum(counts.values()) - counts["none"]
    shares = [f"{counts[effort] / num_traces:.1%}" if num_traces else "–" for effort in EFFORTS[1:]]
    return [str(counts["none"]), *shares]


def _notes(report: LabelReport) -> list[str]:
    notes = []
    if ungraded := sum(group.rows for group in report.groups if group.difficulty == UNGRADED):
        notes.append(f"{ungraded} rows have no level of difficulty; they are a group of their own, {UNGRADED}")
    if report.hidden_reasoning:
        notes.append(
            f"{report.hidden_reasoning} rows labelled none have a reasoning inside content, in <think> marks, where "
            "it is not counted; move it to reasoning_content and label them again"
        )
    return notes
