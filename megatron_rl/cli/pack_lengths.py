"""Lengths of documents for megatron-rl pack: rendered conversations, a column of them, or a list of numbers."""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from megatron_rl.config import DataError
from megatron_rl.data.conversation import conversation_of, shown
from megatron_rl.data.mask import MaskConfig
from megatron_rl.data.packing import Oversized
from megatron_rl.data.rows import Rows, iterate, open_rows

if TYPE_CHECKING:
    from megatron_rl.data.render import ChatRenderer

Document = tuple[str, int]
"""(what errors call it, its tokens)"""

_ANY_MASK = MaskConfig(wrong_tool_calls="train")
"""The mask does not change a length; this one costs least."""


@dataclass(frozen=True)
class Documents:
    """What is packed."""

    positions: np.ndarray
    """int64 [documents]: those that each fills, its tokens less one."""
    num_oversized: int
    """Documents that were cut or left out."""


def documents_of(found: Iterator[Document], *, capacity: int, oversized: Oversized) -> Documents:
    """Reads all lengths, 8 bytes for each. DataError for the first that is too short or, by oversized, too long."""
    positions, num_oversized = array("q"), 0
    for source, num_tokens in found:
        if num_tokens < 2:
            raise DataError(f"{source}: a document must have at least 2 tokens, got {num_tokens}; remove it")
        if num_tokens - 1 <= capacity:
            positions.append(num_tokens - 1)
            continue
        if oversized == "error":
            raise DataError(
                f"{source}: a document must fill at most the {capacity} positions of --capacity, got {num_tokens - 1}; "
                "shorten it, raise --capacity, or set --oversized to truncate or drop"
            )
        num_oversized += 1
        if oversized == "truncate":
            positions.append(capacity)
    if not positions:
        left_out = f", all {num_oversized} were dropped" if num_oversized else ""
        raise DataError(f"there must be at least one document to pack, got none{left_out}; give longer data")
    return Documents(np.array(positions, dtype=np.int64), num_oversized)


def listed(file: Path) -> Iterator[Document]:
    """One whole number of tokens per line, blank lines left out."""
    try:
        lines = file.open(encoding="utf-8", errors="replace")
    except OSError as error:
        raise DataError(
            f"--lengths {file} must be readable, got {error.strerror}; give a file of one number per line"
        ) from None
    with lines:
        for number, line in enumerate(lines, start=1):
            text = line.strip()
            if not text:
                continue
            if not (text.isascii() and text.isdigit() and len(text) < 19):
                raise DataError(f"{file}:{number}: a line must be a number of tokens, got {text!r:.80}; mend it")
            yield f"{file}:{number}", int(text)


def of_column(data: Sequence[Path], column: str) -> Iterator[Document]:
    """A column of row files that counts each row's tokens."""
    for source, row in _rows(data):
        if isinstance(row, DataError):
            raise row
        if column not in row:
            raise DataError(f"{source}: a row must have the column {column}, got {shown(list(row))}; name another one")
        if type(row[column]) is not int:
            raise DataError(f"{source}: {column} must be a number of tokens, got {shown(row[column])}; mend it")
        yield source, row[column]


def rendered(data: Sequence[Path], renderer: "ChatRenderer") -> Iterator[Document]:
    """Conversations, rendered one at a time as the trainer does."""
    for source, row in _rows(data):
        if isinstance(row, DataError):
            raise row
        yield source, len(renderer.render(conversation_of(source, row), _ANY_MASK).token_ids)


def _rows(data: Sequence[Path]) -> Iterator[tuple[str, dict[str, Any] | DataError]]:
    """Rows of all files, with a bar on a terminal."""
    files: list[Rows] = [open_rows(path) for path in data]
    console = Console(stderr=True)
    columns = TextColumn("reading"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=sum(map(len, files)))
        for file in files:
            for row in iterate(file):
                yield row
                bar.advance(task)
