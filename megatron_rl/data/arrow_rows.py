"""Rows of Parquet files and of `datasets` folders.

Arrow gives all structs of a column the same fields, so it cannot tell a null field from a missing one: both are missing
in the rows given out here. Columns of Arrow's JSON type come as the objects they say.
"""

import hashlib
import json
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from megatron_rl.config import DataError

if TYPE_CHECKING:
    import pyarrow as pa

CACHED_BYTES = 512 << 20
"""Most bytes of decoded row groups that one dataset keeps, besides the one in use."""


class RowGroups:
    """The row groups used last, decoded."""

    def __init__(self, max_bytes: int = CACHED_BYTES) -> None:
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._tables: OrderedDict[tuple[Path, int], pa.Table] = OrderedDict()

    def get(self, key: tuple[Path, int], read: Callable[[], "pa.Table"]) -> "pa.Table":
        """The table of a key, read if it is not here; what was not used for longest makes room."""
        if key in self._tables:
            self._tables.move_to_end(key)
            return self._tables[key]
        table = read()
        self._num_bytes += table.nbytes
        while self._tables and self._num_bytes > self._max_bytes:
            self._num_bytes -= self._tables.popitem(last=False)[1].nbytes
        self._tables[key] = table
        return table


class ParquetRows:
    """Rows of one Parquet file, read by the row group. DataError if it is damaged."""

    def __init__(self, path: Path, groups: RowGroups) -> None:
        import pyarrow.parquet as pq  # with the first file that needs it: a typo need not wait for it

        self.path, self._groups = path, groups
        path.stat()  # says better than pyarrow does that there is no such file
        with _damage(f"data file {path}"), pq.ParquetFile(path) as file:
            self._metadata = file.metadata
        counts = (self._metadata.row_group(group).num_rows for group in range(self._metadata.num_row_groups))
        self._starts = list(accumulate(counts, initial=0))

    def __len__(self) -> int:
        return self._starts[-1]

    def source(self, index: int) -> str:
        """path[row], rows counted from 0."""
        return f"{self.path}[{index}]"

    def row(self, index: int) -> dict[str, Any]:
        """A row by its number; decodes the whole row group if it was not used of late."""
        _check_index(self.path, index, len(self))
        group = bisect_right(self._starts, index) - 1
        with _damage(self.source(index)):
            table = self._groups.get((self.path, group), lambda: self._read(group))
            return _row(table.slice(index - self._starts[group], 1))

    def identity(self) -> str:
        """Digest of every byte; reads the whole file."""
        return _digest([self.path])

    def _read(self, group: int) -> "pa.Table":
        import pyarrow.parquet as pq

        with pq.ParquetFile(self.path, metadata=self._metadata) as file:
            return file.read_row_group(group)


class DatasetRows:
    """Rows of a folder written by save_to_disk of `datasets`, memory-mapped. DataError if it is damaged."""

    def __init__(self, path: Path) -> None:
        from datasets import load_from_disk  # seconds of import: with the first folder that needs it

        self.path = path
        with _damage(f"data folder {path}"):
            self._dataset: Any = load_from_disk(str(path)).with_format("arrow")

    def __len__(self) -> int:
        return len(self._dataset)

    def source(self, index: int) -> str:
        """path[row], rows counted from 0."""
        return f"{self.path}[{index}]"

    def row(self, index: int) -> dict[str, Any]:
        """A row by its number."""
        _check_index(self.path, index, len(self))
        with _damage(self.source(index)):
            return _row(self._dataset[index])

    def identity(self) -> str:
        """Digest of every byte of the Arrow files; reads them all."""
        return _digest([Path(entry["filename"]) for entry in self._dataset.cache_files])


def _check_index(path: Path, index: int, count: int) -> None:
    if not 0 <= index < count:
        raise IndexError(f"{path} has rows 0 to {count - 1}, got {index}")


def _digest(paths: Sequence[Path]) -> str:
    digest = xxhash.xxh3_128()
    for path in paths:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, xxhash.xxh3_128).digest())
    return digest.hexdigest()


def _row(table: "pa.Table") -> dict[str, Any]:
    """The only row of a table."""
    values = table.to_pylist(maps_as_pydicts="lossy")[0]
    kinds = {field.name: field.type for field in table.schema}
    return {name: _plain(value, kinds[name]) for name, value in values.items() if value is not None}


def _plain(value: Any, kind: "pa.DataType") -> Any:
    """A value without the struct fields that are null, and with JSON text in place of its type parsed."""
    import pyarrow as pa

    if value is None:
        return None
    if pa.types.is_struct(kind):
        kinds = {field.name: field.type for field in kind}
        return {name: _plain(item, kinds[name]) for name, item in value.items() if item is not None}
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return [_plain(item, kind.value_type) for item in value]
    return json.loads(value) if isinstance(kind, pa.JsonType) else value


@contextmanager
def _damage(name: str) -> Iterator[None]:
    """Turns what a library says about damaged contents into a DataError about name."""
    try:
        yield
    except Exception as error:  # pyarrow and datasets document no closed set of errors for damaged files
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"{name} must be readable, got {type(error).__name__}: {reason}; write it anew") from error
