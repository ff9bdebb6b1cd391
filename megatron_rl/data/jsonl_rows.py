"""Rows of a JSONL file: where each starts is learned in one pass, and a row is read when it is asked for."""

import json
import os
from array import array
from bisect import bisect_right
from pathlib import Path
from typing import Any

import xxhash

from megatron_rl.config import DataError
from megatron_rl.data.conversation import shown

_READ_BYTES = 1 << 20


class JsonlRows:
    """One JSON object per line, blank lines left out. Holds 8 bytes per line and no open file.

    DataError if the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._starts, self._blanks = array("q"), array("q")
        digest, position = xxhash.xxh3_128(), 0
        with path.open("rb", buffering=_READ_BYTES) as file:
            for line in file:
                if line.isspace():
                    self._blanks.append(len(self._starts))
                else:
                    self._starts.append(position)
                position += len(line)
                digest.update(line)
        self._starts.append(position)
        self._digest = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._starts) - 1

    def source(self, index: int) -> str:
        """path:line, lines counted from 1, blank ones included."""
        return f"{self.path}:{index + 1 + bisect_right(self._blanks, index)}"

    def row(self, index: int) -> dict[str, Any]:
        """The object on a line. DataError if it is none."""
        if not 0 <= index < len(self):
            raise IndexError(f"{self.path} has rows 0 to {len(self) - 1}, got {index}")
        try:
            return _object(self._line(index))
        except _LineError as error:
            raise DataError(f"{self.source(index)}: {error}") from None

    def identity(self) -> str:
        """Digest of every byte."""
        return self._digest

    def _line(self, index: int) -> bytes:
        start, end = self._starts[index], self._starts[index + 1]
        try:
            with self.path.open("rb", buffering=0) as file:
                line = os.pread(file.fileno(), end - start, start)
        except OSError as error:
            raise _LineError(f"the file must stay readable, got {error.strerror}; restore it") from None
        if len(line) < end - start:
            raise _LineError("the file must stay as it was when the run started, got a shorter one; start again")
        return line


class _LineError(Exception):
    """Rule, value and cure; the caller knows file and line."""


def _object(line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8-sig").rstrip())
    except UnicodeDecodeError as error:
        raise _LineError(f"a row must be UTF-8 text, got byte {line[error.start]:#04x}; convert the file") from None
    except (ValueError, RecursionError) as error:
        reason = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise _LineError(f"a row must be one JSON object, got malformed JSON: {reason}; mend the line") from None
    if not isinstance(row, dict):
        raise _LineError(f"a row must be a JSON object, got {shown(row)}; write an object with messages")
    # Valid JSON may escape half of a surrogate pair, which no tokenizer takes. UTF-8 itself cannot hold one.
    if rb"\ud" in line.lower():
        try:
            json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise _LineError("a row must be Unicode text, got half of a surrogate pair; mend the escape") from None
    return row
