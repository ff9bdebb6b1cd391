"""Tables of measurements, on the terminal and in docs/performance.md."""

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

PAGE = Path(__file__).parents[2] / "docs" / "performance.md"


@dataclass(frozen=True)
class Rows:
    """One table."""

    title: str
    columns: list[str]
    rows: list[list[str]]


def show(table: Rows) -> None:
    drawn = Table(title=table.title)
    for column in table.columns:
        drawn.add_column(column, justify="left" if column == table.columns[0] else "right")
    for row in table.rows:
        drawn.add_row(*row)
    Console(width=120).print(drawn)


def write_page(part: str, tables: list[Rows]) -> None:
    """Replaces what lies between the page's two marks of this part."""
    begin, end = f"<!-- {part}, measured by: make bench -->", f"<!-- end of {part} -->"
    page = PAGE.read_text(encoding="utf-8")
    assert page.count(begin) == page.count(end) == 1, f"{PAGE} must hold both marks of {part} once"
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    parts = [f"{_machine()}; medians of the rounds.", *map(_as_markdown, tables)]
    PAGE.write_text(f"{before}{begin}\n\n" + "\n\n".join(parts) + f"\n\n{end}{after}", encoding="utf-8")


def _as_markdown(table: Rows) -> str:
    lines = [table.columns, ["---", *["---:"] * (len(table.columns) - 1)], *table.rows]
    return "\n".join([f"**{table.title}**", "", *("| " + " | ".join(line) + " |" for line in lines)])


def _machine() -> str:
    """Processor, cores and versions, without names of hosts."""
    models = [line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    kind = models[0] if models else platform.machine()
    return f"{kind}, {len(os.sched_getaffinity(0))} cores, torch {torch.__version__}"


def _lines(path: str) -> list[str]:
    file = Path(path)
    return file.read_text().splitlines() if file.exists() else []
