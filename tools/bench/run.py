"""Times what this project claims to be fast at, as ratios measured in turn in one run: make bench.

The trainer's step in every layout against a plain Hugging Face loop over the same documents; the log-prob head against
materialised logits, in time and memory; the packer against plain Python, and cost-sorting against what it replaces.
Absolute figures belong to the machine and the minute; --docs writes the tables into docs/performance.md.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, get_args

import balance
import head
import loader
import packing
import torch
from tables import Rows, show, write_page

from megatron_rl.cli.tiny import TinyFamily, make_tiny

HERE = Path(__file__).parent
ONE_PROCESS = ("1 process", "1 process, bfloat16", "1 process, 2 threads")
TWO_PROCESSES = ("DP2", "DP2, bfloat16", "EP2", "ETP2", "TP2", "TP2, EP2", "PP2, 4 microbatches", "CP2")


def trainer_rows(family: TinyFamily, rounds: int, wanted: str) -> Rows:
    """Every layout whose name holds wanted, in one spawn per number of processes."""
    table = Rows(
        f"trainer, tiny {family}: tokens/s, and times a plain loop ({rounds} rounds)",
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
    if options.docs:
        write_page("trainer", tables)
    head.measure(options.rounds, docs=options.docs)
    packing.measure(options.rounds, docs=options.docs)
    balance.measure(min(options.rounds, 2), docs=options.docs)
    loader.measure(options.rounds, docs=options.docs)


if __name__ == "__main__":
    main()
