"""A distillation from start to end: rows are checked, what is missing is asked, everything is written in input order.

Invariant: output, dropped rows and report are made from the journal alone, whole or not at all; a run that was killed
at any moment and started again asks for nothing that was answered, and ends with the same files.
"""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from megatron_rl.config import DataError
from megatron_rl.data.distill.backfill import BackfillTask
from megatron_rl.data.distill.config import BackfillRun, DistillConfig, PrefillRun
from megatron_rl.data.distill.language import LanguageJudge
from megatron_rl.data.distill.prefill import PrefillTask
from megatron_rl.data.distill.rows import SourceRow, dumped, usable_rows
from megatron_rl.data.distill.tally import DROPPED, Tally
from megatron_rl.data.distill.task import Task
from megatron_rl.data.journal import Job, Journal, RunCounts, run_all
from megatron_rl.data.rows import Rows, open_rows

BAD_ROW = "cannot be used"


@dataclass(frozen=True)
class DistillPaths:
    """Everything that is written."""

    output: Path
    journal: Path
    dropped: Path
    report: Path

    @classmethod
    def of(cls, output: str) -> "DistillPaths":
        """Beside the output."""
        path = Path(output)
        return cls(path, *(path.with_suffix(suffix) for suffix in (".journal", ".dropped.jsonl", ".report.json")))


@dataclass(frozen=True)
class DistillResult:
    """What a run came to."""

    paths: DistillPaths
    tally: Tally
    columns: Sequence[tuple[str, str]]
    """Of the report's table: (title, count or share)."""
    caption: str
    counts: RunCounts
    """Of this run alone."""
    notes: list[str]

    def report(self, config: DistillConfig) -> dict[str, Any]:
        """The report as JSON: what was run, and what came of the rows of all runs."""
        settings = config.model_dump(mode="json")
        return {"kind": settings["kind"], "config": settings, "notes": self.notes, **self.tally.as_json()}


OnProgress = Callable[[RunCounts, int, Counter[str]], None]
"""(counts so far, jobs of this run, the task's own counts)."""


async def distill(
    config: PrefillRun | BackfillRun, on_progress: OnProgress = lambda counts, total, live: None
) -> DistillResult:
    """Runs or resumes one distillation.

    DataError: a bad row, or a journal of other settings. ConfigError: an option or a chat template that does not fit.
    EndpointError: an endpoint that cannot be used at all; requests that failed for single rows are counted.
    """
    task: Task = PrefillTask(config) if isinstance(config, PrefillRun) else BackfillTask(config)
    paths = DistillPaths.of(config.output)
    rows = open_rows(config.input)
    languages = _languages(rows, task, config)
    judge = LanguageJudge(languages | {config.language.default, *config.language.others})
    with Journal(paths.journal, task.settings()) as journal:

        def jobs() -> Iterator[tuple[str, Job]]:
            usable = usable_rows(rows, task.parse, config.limit)
            return chain.from_iterable(task.jobs(row, journal, judge) for row in usable if isinstance(row, SourceRow))

        counts, notes = await _ask(task, jobs, journal, on_progress)
        tally = _write(rows, task, config, journal, judge)
    result = DistillResult(paths, tally, task.columns, task.caption, counts, notes)
    with _whole_file(paths.report) as file:
        file.write(json.dumps(result.report(config), ensure_ascii=False, indent=1).encode() + b"\n")
    return result


def _languages(rows: Rows, task: Task, config: DistillConfig) -> set[str]:
    """Looks at every row before anything is asked."""
    languages = set()
    for row in usable_rows(rows, task.parse, config.limit):
        if isinstance(row, SourceRow):
            languages.add(row.language)
        elif config.on_bad_row == "error":
            raise row
    return languages


async def _ask(
    task: Task, jobs: Callable[[], Iterator[tuple[str, Job]]], journal: Journal, on_progress: OnProgress
) -> tuple[RunCounts, list[str]]:
    total = sum(1 for _ in jobs())
    if not total:
        return RunCounts(), []
    async with AsyncExitStack() as stack:
        for endpoint in task.endpoints:
            await stack.enter_async_context(endpoint)
        notes = await task.check()
        concurrency = sum(endpoint.config.concurrency for endpoint in task.endpoints)
        counts = await run_all(
            jobs(),
            journal,
            concurrency=concurrency,
            on_progress=lambda counts: on_progress(counts, total, task.live),
        )
    return counts, notes


def _write(rows: Rows, task: Task, config: DistillConfig, journal: Journal, judge: LanguageJudge) -> Tally:
    """Writes output and dropped rows from the journal."""
    paths, tally = DistillPaths.of(config.output), Tally()
    with _whole_file(paths.output) as output, _whole_file(paths.dropped) as dropped:
        for row in usable_rows(rows, task.parse, config.limit):
            if isinstance(row, DataError):
                tally.add(config.language.default, config.domain, {"rows": 1, f"{DROPPED}{BAD_ROW}": 1})
                dropped.write(dumped({"reason": BAD_ROW, "error": str(row)}))
                continue
            outcome = task.finish(row, journal, judge, tally)
            if outcome.row is not None:
                output.write(dumped(outcome.row))
            for record in outcome.dropped:
                dropped.write(dumped(record))
    return tally


@contextmanager
def _whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file that takes its name when it is complete."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with partial.open("wb") as file:
            yield file
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
