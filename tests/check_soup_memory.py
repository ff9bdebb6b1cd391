"""Run alone: the most memory that a soup takes, in bytes. Arguments: target, small target, then folders.

Linux counts what a process has resident; its high-water mark is reset before the soup and read after it, in a process
that has made a soup of the last folder already. Files are read, not mapped, so no page of them is counted.
"""

import ctypes
import sys
from pathlib import Path

import torch

from megatron_rl.checkpoint.soup import soup


def resident(field: str) -> int:
    """Bytes: VmRSS now, or VmHWM since the last reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def main() -> None:
    target, small_target, *sources, small = (Path(argument) for argument in sys.argv[1:])
    torch.set_num_threads(1)
    soup([small, small], small_target)
    ctypes.CDLL(None).malloc_trim(0)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    soup(sources, target)
    print(resident("VmHWM") - before)


if __name__ == "__main__":
    main()
