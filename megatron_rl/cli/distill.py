"""megatron-rl distill CONFIG: data from a teacher, with progress, a table and a report."""

import asyncio
import signal
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from megatron_rl.cli.job_progress import JobProgress
from megatron_rl.cli.output_folder import check_folder, writing
from megatron_rl.config import RunError, RunStop
from megatron_rl.config.load import load_config, read_tree
from megatron_rl.data.distill.config import BackfillRun, PrefillRun
from megatron_rl.data.distill.run import DistillPaths, DistillResult, distill
from megatron_rl.data.distill.tally import SHARES

_LIVE = {"prefill": ("in language", "in_language_share"), "backfill": ("same call", "agreed_share")}
"""What the progress line shows of what was answered so far."""
_CANCEL_EVERY_S = 0.2


def load_distill(path: Path, overrides: list[str]) -> PrefillRun | BackfillRun:
    """The config of a YAML file, by its `kind`. ConfigError lists what does not fit."""
    is_backfill = read_tree(path, overrides).get("kind") == "backfill"
    return load_config(path, BackfillRun if is_backfill else PrefillRun, overrides)


def run_distill(config: PrefillRun | BackfillRun) -> None:
    """Runs or resumes one distillation, and prints its table.

    RunError, after everything was written, if requests failed for good; RunStop on Ctrl-C.
    """
    paths = DistillPaths.of(config.output)
    check_folder(paths.output.parent, "the folder of output")
    title, share = _LIVE[config.kind]
    part, whole = SHARES[share]
    with writing(paths.output.parent), JobProgress(config.kind) as progress:
        try:
            result = asyncio.run(
                _until_ctrl_c(
                    distill(
                        config,
                        lambda counts, total, live: progress.update(
                            counts, total, {title: live[part] / live[whole]} if live[whole] else {}
                        ),
                    )
                )
            )
        except (KeyboardInterrupt, asyncio.CancelledError):
            raise RunStop(f"stopped; answers are in {paths.journal}, the same command goes on from there") from None
    _print(config, result)
    if failed := result.counts.failed:
        raise RunError(
            f"every request should be answered, but {failed} of {result.counts.seen} failed for good, at last: "
            f"{result.counts.error}; run the same command again for these, {paths.output} has the rest"
        )


async def _until_ctrl_c(work: Coroutine[Any, Any, DistillResult]) -> DistillResult:
    """The work's result; CancelledError on Ctrl-C.

    The work is cancelled again and again until it ends: a library below that takes one for the end of its own request
    does not make the command deaf.
    """
    loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)

    def stop() -> None:
        if not task.done():
            task.cancel()
            loop.call_later(_CANCEL_EVERY_S, stop)

    loop.add_signal_handler(signal.SIGINT, stop)
    try:
        return await task
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def _print(config: PrefillRun | BackfillRun, result: DistillResult) -> None:
    table = Table(
        box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True, caption=result.caption, caption_justify="left"
    )
    table.add_column("", no_wrap=True)
    for title, _ in result.columns:
        table.add_column(title, justify="right", no_wrap=True)
    lines = result.tally.lines(result.columns)
    for number, cells in enumerate(lines, start=1):
        if number == len(lines) and number > 1:
            table.add_section()
        table.add_row(*cells)
    console = Console()
    console.print(table)
    for reason, count in result.tally.drops():
        console.print(f"dropped {count:,}: {reason}", markup=False, highlight=False)
    for note in result.notes:
        console.print(f"note: {note}", markup=False, highlight=False)
    paths = result.paths
    console.print(
        f"done: {paths.output}, {paths.dropped}, {paths.report}", markup=False, highlight=False, soft_wrap=True
    )
