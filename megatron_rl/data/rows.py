"""Files of rows in any supported form behind one protocol: how many there are, and one by its number."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import xxhash

from megatron_rl.config import DataError
from megatron_rl.data.arrow_rows import DatasetRows, ParquetRows, RowGroups
from megatron_rl.data.jsonl_rows import JsonlRows

FORMS = "a .jsonl or .parquet file, a folder written by save_to_disk of `datasets`, or a folder of such files"


class Rows(Protocol):
    """Rows that can be read in any order; only what is asked for is read."""

    path: Path

    def __len__(self) -> int: ...

    def source(self, index: int) -> str:
        """What errors call a row: path:line of JSONL, path[row] of the other forms, rows counted from 0."""
        ...

    def row(self, index: int) -> dict[str, Any]:
        """A row by its number, from 0. DataError with source, rule, value and cure for one that cannot be read."""
        ...

    def identity(self) -> str:
        """Digest that changes with the contents, and does not with the path. May read them all: ask once."""
        ...


def open_rows(path: str | Path) -> Rows:
    """The rows of a file or folder. DataError if it is missing, empty, damaged or of an unknown form.

    JSONL: one pass over the file, 8 bytes per line; Parquet: the footer, later whole row groups, of which at most
    CACHED_BYTES stay in memory; `datasets`: memory-mapped. A folder's files follow one another in order of their names.
    """
    path, groups = Path(path), RowGroups()
    try:
        return _open_folder(path, groups) if _is_plain_folder(path) else _open(path, groups)
    except OSError as error:
        raise DataError(
            f"data file {path} must be readable, got {error.strerror or error}; give the path of {FORMS}"
        ) from None


def iterate(rows: Rows) -> Iterator[tuple[str, dict[str, Any] | DataError]]:
    """(source, row or what is wrong with it) in order, one row in memory at a time."""
    for index in range(len(rows)):
        try:
            row: dict[str, Any] | DataError = rows.row(index)
        except DataError as error:
            row = error
        yield rows.source(index), row


class FolderRows:
    """Several files one after another."""

    def __init__(self, path: Path, parts: Sequence[Rows]) -> None:
        self.path = path
        self._parts = parts
        self._starts = list(accumulate((len(part) for part in parts), initial=0))

    def __len__(self) -> int:
        return self._starts[-1]

    def source(self, index: int) -> str:
        """What the file that holds the row calls it."""
        part, own = self._place(index)
        return part.source(own)

    def row(self, index: int) -> dict[str, Any]:
        """A row by its number over all files."""
        part, own = self._place(index)
        return part.row(own)

    def identity(self) -> str:
        """Digest of the files' own, in order."""
        return xxhash.xxh3_128_hexdigest(" ".join(part.identity() for part in self._parts).encode())

    def _place(self, index: int) -> tuple[Rows, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"{self.path} has rows 0 to {len(self) - 1}, got {index}")
        part = bisect_right(self._starts, index) - 1
        return self._parts[part], index - self._starts[part]


def _open(path: Path, groups: RowGroups) -> Rows:
    """The rows of one file, or of one folder of `datasets`."""
    if path.is_dir():
        rows: Rows = DatasetRows(path)
    elif path.suffix == ".parquet":
        rows = ParquetRows(path, groups)
    elif path.suffix == ".jsonl":
        rows = JsonlRows(path)
    else:
        path.stat()
        raise DataError(
            f"data file {path} must be {FORMS}, got {path.suffix or 'no suffix'}; convert it, or rename JSON lines to "
            ".jsonl"
        )
    if not len(rows):
        raise DataError(f"data file {path} must have at least one conversation, got none; write one per line or row")
    return rows


def _is_plain_folder(path: Path) -> bool:
    return path.is_dir() and not (path / "state.json").is_file()


def _open_folder(path: Path, groups: RowGroups) -> Rows:
    """All files of a folder; what has no rows by its name is left out, what may have some is refused."""
    if (path / "dataset_dict.json").is_file():
        splits = sorted(entry.name for entry in path.iterdir() if entry.is_dir())
        raise DataError(
            f"data folder {path} must be one split, got several: {', '.join(splits)}; name one, as in "
            f"{path / (splits[0] if splits else 'train')}"
        )
    entries = sorted(entry for entry in path.iterdir() if not _is_about_data(entry))
    for entry in entries:
        if _is_plain_folder(entry) or (entry.is_file() and entry.suffix not in (".jsonl", ".parquet")):
            raise DataError(
                f"data folder {path} must hold nothing but .jsonl and .parquet files and `datasets` folders, got "
                f"{entry.name}; move it away, or name the files one by one"
            )
    if not entries:
        raise DataError(f"data folder {path} must hold .jsonl or .parquet files, got none; give the path of {FORMS}")
    return FolderRows(path, [_open(entry, groups) for entry in entries])


def _is_about_data(entry: Path) -> bool:
    """Whether a folder's entry describes the data, as what a dataset repository has beside it does."""
    return entry.name.startswith((".", "LICENSE", "README")) or entry.suffix == ".md"
