"""JSON lines that survive kill -9: a record is whole or, as a torn last line, never happened."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path


def append_line(path: Path, line: bytes) -> None:
    """Adds one record. Opens the file anew, so a rewrite by keep_lines in between is harmless."""
    assert b"\n" not in line, "a record is one line"
    with path.open("ab") as file:
        file.write(line + b"\n")


def drop_torn_line(path: Path) -> None:
    """Cuts off a last line without its newline, as a killed writer leaves it, so that the next record starts clean."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        size = file.seek(0, os.SEEK_END)
        end = size
        while end:
            start = max(0, end - 65536)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        if end < size:
            file.truncate(end)


def whole_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(line number from 1, line without newline) of every complete, non-empty line; nothing if there is no file."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.endswith(b"\n") and line.strip():
                yield number, line[:-1]


def keep_lines(path: Path, keep: Callable[[int, bytes], bool]) -> int:
    """Rewrites the file atomically with the lines for which keep(number, line) holds; returns how many it drops."""
    if not path.exists():
        return 0
    dropped = 0
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as file:
        for number, line in whole_lines(path):
            if keep(number, line):
                file.write(line + b"\n")
            else:
                dropped += 1
    temporary.replace(path)
    return dropped
