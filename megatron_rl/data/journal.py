"""What was asked and answered, on disk: a job that takes days can be killed at any moment and goes on where it was.

Invariant: a value that put() has returned for is never asked for again; a line torn by a kill never happened.
"""

import asyncio
import fcntl
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from megatron_rl.config import ConfigError, DataError
from megatron_rl.data.endpoint import EndpointError

Job = Callable[[], Awaitable[Mapping[str, Any] | None]]
"""Asks for one value, a JSON object; None if there is nothing to keep."""

GIVE_UP_AFTER = 32
"""Jobs that may fail before the first success of a run: beyond them it is not the rows."""
_HEAD = b'{"settings":'


class _Head(msgspec.Struct):
    settings: dict[str, Any]


class _Line(msgspec.Struct):
    key: str
    value: msgspec.Raw


class Journal:
    """Values by key in a JSON-lines file. Only keys and file offsets are held in memory."""

    def __init__(self, path: str | Path, settings: Mapping[str, Any]) -> None:
        """Opens or begins the file; settings are all that the values depend on besides their key.

        DataError if the file was begun with other settings or is no journal; ConfigError if another process has it.
        """
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._offsets: dict[str, tuple[int, int]] = {}
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            self._lock()
            self._load(settings)
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._offsets)

    def __contains__(self, key: str) -> bool:
        return key in self._offsets

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def get(self, key: str) -> dict[str, Any] | None:
        """The newest value of a key; None if there is none."""
        if key not in self._offsets:
            return None
        offset, size = self._offsets[key]
        return msgspec.json.decode(os.pread(self._file, size, offset))["value"]

    def put(self, key: str, value: Mapping[str, Any]) -> None:
        """Appends one line. A killed process loses nothing that this has returned for; a power cut may lose the end."""
        self._offsets[key] = self._append({"key": key, "value": value})

    def close(self) -> None:
        """Releases the file for other processes."""
        with suppress(OSError):
            os.close(self._file)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(
                f"{self.path} must be used by one process at a time, and another has it open; wait for it to end, or "
                "choose another output"
            ) from None

    def _load(self, settings: Mapping[str, Any]) -> None:
        expected = msgspec.to_builtins(settings)
        begun: Any = None
        for number, (offset, line) in enumerate(self._lines(), start=1):
            if not line.endswith(b"\n") and (number > 1 or line.startswith(_HEAD[: len(line)])):
                os.ftruncate(self._file, offset)
                break
            try:
                if number == 1:
                    begun = msgspec.json.decode(line, type=_Head).settings
                else:
                    self._offsets[msgspec.json.decode(line, type=_Line).key] = (offset, len(line))
            except msgspec.DecodeError:
                raise DataError(
                    f"{self.path}:{number}: must be a line of a journal, got {line[:60]!r}; remove the file to ask for "
                    "everything again"
                ) from None
        if begun is None:
            self._append({"settings": expected})
        elif begun != expected:
            raise DataError(
                f"{self.path} must be continued with the settings it was begun with, got "
                f"{', '.join(_differences(begun, expected))}; go back to those, choose another output, or remove the "
                "file to ask for everything again"
            )

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        offset = 0
        with self.path.open("rb") as file:
            for line in file:
                yield offset, line
                offset += len(line)

    def _append(self, record: Mapping[str, Any]) -> tuple[int, int]:
        """(offset, bytes) of the line written. OSError, and no line, on a full disk."""
        line = msgspec.json.encode(record) + b"\n"
        offset = os.lseek(self._file, 0, os.SEEK_END)
        written = 0
        try:
            while written < len(line):
                written += os.write(self._file, line[written:])
        except OSError as error:
            os.ftruncate(self._file, offset)  # a half line in the middle would spoil the file
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        return offset, len(line)


@dataclass
class RunCounts:
    """How far run_all is."""

    found: int = 0
    """Jobs whose value the journal had already."""
    done: int = 0
    """Jobs that this run finished."""
    failed: int = 0
    """Jobs whose requests failed for good; the next run tries them again."""
    error: str = ""
    """What the last failed job said."""

    @property
    def seen(self) -> int:
        """Jobs that are over, in whatever way."""
        return self.found + self.done + self.failed


async def run_all(
    keys_and_jobs: Iterable[tuple[str, Job]],
    journal: Journal,
    *,
    concurrency: int,
    on_progress: Callable[[RunCounts], None] = lambda counts: None,
) -> RunCounts:
    """Runs the jobs whose key the journal lacks, so many at a time, and puts their values there.

    A key that comes again is asked for once. keys_and_jobs is read as jobs are started, never ahead of them. A job's
    EndpointError counts as failed; one that is fatal, or GIVE_UP_AFTER of them before any success, ends all and is
    raised. Any other error of a job ends all and is raised too.
    """
    counts = RunCounts()
    started: set[str] = set()

    async def work() -> None:
        async for key, job in _next_jobs(keys_and_jobs_iterator):
            if key in journal or key in started:
                counts.found += 1
            else:
                started.add(key)
                await _run_one(key, job, journal, counts)
            on_progress(counts)

    keys_and_jobs_iterator = iter(keys_and_jobs)
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(work())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0]  # noqa: B904  # the group says nothing that its first error does not
    return counts


async def _next_jobs(jobs: Iterator[tuple[str, Job]]) -> AsyncIterator[tuple[str, Job]]:
    """The rest of an iterator that several workers share; lets others run in between."""
    for pair in jobs:
        yield pair
        await asyncio.sleep(0)


async def _run_one(key: str, job: Job, journal: Journal, counts: RunCounts) -> None:
    try:
        if (value := await job()) is not None:
            journal.put(key, value)
        counts.done += 1
    except EndpointError as error:
        counts.failed += 1
        counts.error = str(error)
        if error.fatal or (counts.failed >= GIVE_UP_AFTER and not counts.done):
            raise


def _differences(begun: Any, now: Any, name: str = "") -> Iterator[str]:
    """Settings that differ, as in `sampling.temperature: 0.6, now 1.0`."""
    if isinstance(begun, dict) and isinstance(now, dict):
        for key in begun | now:
            yield from _differences(begun.get(key), now.get(key), f"{name}.{key}" if name else key)
    elif begun != now:
        yield f"{name}: {_shown(begun)}, now {_shown(now)}"


def _shown(value: Any) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 60 else text[:57] + "..."
