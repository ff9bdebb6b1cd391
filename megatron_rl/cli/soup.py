"""megatron-rl soup: checkpoints averaged into one."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from megatron_rl.checkpoint.soup import SoupDtype, soup, soup_weights
from megatron_rl.cli.output_folder import check_folder
from megatron_rl.config import ConfigError


def run_soup(
    sources: Sequence[Path], target: Path, *, weights: str | None, normalise: bool, dtype: SoupDtype | None
) -> Path:
    """Writes the soup with a progress bar on a terminal. Returns target. weights: numbers with commas between them."""
    shares = soup_weights(len(sources), parse_weights(weights), normalise=normalise)
    check_folder(target.parent, "the folder of TARGET")
    with write_progress() as show:
        return soup(sources, target, weights=shares, dtype=dtype, on_written=lambda *sizes: show(target.name, *sizes))


def parse_weights(text: str | None) -> list[float] | None:
    """Numbers of --weights; ConfigError for anything else."""
    if text is None:
        return None
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"--weights must be numbers with commas between them, got {text!r}; write .7,.3") from error


@contextmanager
def write_progress() -> Iterator[Callable[[str, int, int], None]]:
    """Yields what takes (name, bytes written, bytes in all) and shows a bar for each name, on a terminal only."""
    console = Console(file=sys.stderr)
    columns = (BarColumn(bar_width=20), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(
        TextColumn("[bold]{task.description}"), *columns, console=console, disable=not console.is_terminal
    ) as bar:
        tasks = {}

        def show(name: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = bar.add_task(name, total=total)
            bar.update(tasks[name], completed=done)

        yield show
