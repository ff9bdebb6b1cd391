"""Times what this project claims to be fast at, as ratios measured in turn in one run: make bench.

The trainer's step in every layout against a plain Hugging Face loop over the same documents, and the log-prob head
against materialised logits. Absolute figures belong to the machine and the minute; --docs writes the tables into
docs/performance.md.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import head
import torch
from rich.console import Console
from rich.table import Table

from megatron_rl.cli.tiny import TinyFamily, make_tiny

HERE = Path(__file__).parent
PAGE = HERE.parent.parent / "docs" / "performance.md"
ONE_PROCESS = ("1 process", "1 process, bfloat16", "1 process, 2 threads")
TWO_PROCESSES = ("DP2", "DP2, bfloat16", "EP2", "ETP2", "TP2", "TP2, EP2", "PP2, 4 microbatches", "CP2")
HEAD_SIZES = ((4096, 128, 512), (2048, 512, 32768))
"""Tokens, hidden size, vocabulary: the quickstart's model, and a real vocabulary."""


@dataclass(frozen=True)
class Rows:
    """One table."""

    title: str
    columns: list[str]
    rows: list[list[str]]


def trainer_rows(family: TinyFamily, rounds: int, wanted: str) -> Rows:
    """Every layout whose name holds wanted, in one spawn per number of processes."""
    table = Rows(
        f"trainer, tiny {family}: tokens/s, and times a plain loop",
        ["layout", "ours", "plain, 1 process", "ratio", "plain, DDP", "ratio"],
        [],
    )
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny(Path(folder), num_train=16, num_heldout=8, family=family).model
        for processes, layouts in ((1, ONE_PROCESS), (2, TWO_PROCESSES)):
            names = [name for name in layouts if wanted in name]
            if names:
                print(f"{family}, {processes} process(es): {'; '.join(names)} (minutes)", file=sys.stderr, flush=True)
                measured = spawn(model, Path(folder) / "rows.json", processes, rounds, names)
                table.rows.extend(trainer_row(row, measured["tokens"]) for row in measured["rows"])
    return table


def spawn(model: Path, out: Path, processes: int, rounds: int, names: list[str]) -> dict[str, Any]:
    """What trainer.py measured under torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command += [str(HERE / "trainer.py"), str(model), str(out), str(rounds), *names]
    # Threads that spin while they wait take the cores from whoever works.
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        sys.exit(f"trainer.py {names} failed:\n{done.stdout[-4000:]}")
    return json.loads(out.read_text())


def trainer_row(row: dict[str, Any], tokens: float) -> list[str]:
    """Of several plain loops of one kind the fastest is what counts."""
    seconds: dict[str, float] = row["seconds"]
    cells = [row["layout"], f"{tokens / seconds['ours']:,.0f}"]
    for kind in ("1 process", "DDP"):
        rivals = [name for name in seconds if name.startswith(kind)]
        if not rivals:
            cells += ["", ""]
            continue
        best = min(rivals, key=lambda name: seconds[name])
        how = "" if best.endswith("float32 weights") else f" ({best.split('/')[1]})"
        cells += [f"{tokens / seconds[best]:,.0f}{how}", f"{row['ratio'][best]:.2f}x"]
    return cells


def head_rows(rounds: int) -> Rows:
    """The log-prob head, entropy included."""
    table = Rows(
        "log-prob head, forward and backward, 1 thread", ["sizes", "dtype", "ours, s", "plain, s", "ratio"], []
    )
    for sizes in HEAD_SIZES:
        for dtype in (torch.float32, torch.bfloat16):
            ours, plain, ratio = head.measure(*sizes, dtype=dtype, rounds=rounds)
            name = "T={} H={} V={}".format(*sizes)
            table.rows.append([name, str(dtype)[6:], f"{ours:.3f}", f"{plain:.3f}", f"{ratio:.2f}x"])
    return table


def machine() -> str:
    """Processor, cores and versions, without names of hosts."""
    models = [line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    kind = models[0] if models else platform.machine()
    return f"{kind}, {len(os.sched_getaffinity(0))} cores, torch {torch.__version__}"


def _lines(path: str) -> list[str]:
    file = Path(path)
    return file.read_text().splitlines() if file.exists() else []


def show(table: Rows) -> None:
    drawn = Table(title=table.title)
    for column in table.columns:
        drawn.add_column(column, justify="left" if column == table.columns[0] else "right")
    for row in table.rows:
        drawn.add_row(*row)
    Console(width=120).print(drawn)


def as_markdown(table: Rows) -> str:
    lines = [table.columns, ["---", *["---:"] * (len(table.columns) - 1)], *table.rows]
    return "\n".join([f"**{table.title}**", "", *("| " + " | ".join(line) + " |" for line in lines)])


def write_page(tables: list[Rows], rounds: int) -> None:
    """Replaces what lies between the page's two marks."""
    begin, end = "<!-- measured by: make bench -->", "<!-- end of measurements -->"
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    parts = [f"{machine()}; medians of {rounds} rounds.", *(as_markdown(table) for table in tables)]
    PAGE.write_text(f"{before}{begin}\n\n" + "\n\n".join(parts) + f"\n\n{end}{after}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="measured steps of each side")
    parser.add_argument("--family", choices=get_args(TinyFamily), action="append", help="default: all")
    parser.add_argument("--layouts", default="", help="only layouts whose name holds this text")
    parser.add_argument("--docs", action="store_true", help="also write docs/performance.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tables = []
    for family in options.family or get_args(TinyFamily):
        tables.append(trainer_rows(family, options.rounds, options.layouts))
        show(tables[-1])
    tables.append(head_rows(options.rounds))
    show(tables[-1])
    if options.docs:
        write_page(tables, options.rounds)


if __name__ == "__main__":
    main()
