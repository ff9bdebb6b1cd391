"""Nothing that was answered is lost or asked twice, whenever a process is killed."""

import asyncio
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.config import ConfigError, DataError
from megatron_rl.data.endpoint import EndpointError
from megatron_rl.data.journal import GIVE_UP_AFTER, Job, Journal, RunCounts, run_all

SETTINGS = {"model": "m", "sampling": {"temperature": 0.6}}
VALUES = st.dictionaries(st.text(max_size=3), st.dictionaries(st.sampled_from("ab"), st.text(max_size=9)), max_size=6)


@given(VALUES, st.data())
def test_a_file_cut_anywhere_keeps_every_whole_line_and_grows_on(
    tmp_path_factory: pytest.TempPathFactory, values: dict[str, dict[str, str]], data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("journal") / "answers"
    with Journal(path, SETTINGS) as journal:
        for key, value in values.items():
            journal.put(key, value)
    whole = path.read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:cut])
    num_lines = whole[:cut].count(b"\n")
    kept = dict(list(values.items())[: max(0, num_lines - 1)])
    with Journal(path, SETTINGS) as journal:
        assert len(journal) == len(kept)
        assert {key: journal.get(key) for key in values} == {key: kept.get(key) for key in values}
        for key, value in values.items():
            journal.put(key, value)
    with Journal(path, SETTINGS) as journal:
        assert {key: journal.get(key) for key in values} == values


def test_the_newest_value_of_a_key_counts(tmp_path: Path) -> None:
    with Journal(tmp_path / "j", SETTINGS) as journal:
        journal.put("a", {"n": 1})
        journal.put("a", {"n": 2})
        assert journal.get("a") == {"n": 2} and "a" in journal and journal.get("b") is None
    with Journal(tmp_path / "j", SETTINGS) as journal:
        assert journal.get("a") == {"n": 2} and len(journal) == 1


def test_other_settings_a_foreign_file_and_a_second_process_are_refused_untouched(tmp_path: Path) -> None:
    path = tmp_path / "j"
    with Journal(path, SETTINGS) as journal:
        journal.put("a", {"n": 1})
        with pytest.raises(ConfigError, match="one process at a time, and another has it open"):
            Journal(path, SETTINGS)
    before = path.read_bytes()
    other = {"model": "m", "sampling": {"temperature": 1.0}, "seed": 1}
    with pytest.raises(DataError, match=r"sampling\.temperature: 0\.6, now 1\.0, seed: null, now 1; go back to those"):
        Journal(path, other)
    assert path.read_bytes() == before
    line, foreign = b'{"settings": {"model": "m"}}\n', (b'{"a": 1}\n', b"notes", b"[]\n")
    for text in (*foreign, line + b"x\n", line + b'{"key": 1}\n'):
        path.write_bytes(text)
        with pytest.raises(DataError, match=r"j:[12]: must be a line of a journal"):
            Journal(path, {"model": "m"})
        assert path.read_bytes() == text


def test_a_disk_without_room_leaves_no_half_line(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Journal(tmp_path / "j", SETTINGS) as journal:
        journal.put("a", {"n": 1})
        resource.setrlimit(resource.RLIMIT_FSIZE, (journal.path.stat().st_size + 50, before[1]))
        try:
            with pytest.raises(OSError, match="File too large") as error:
                journal.put("b", {"n": "x" * 100})
            journal.put("c", {"n": 3})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert error.value.filename == str(journal.path) and "b" not in journal
    with Journal(tmp_path / "j", SETTINGS) as journal:
        assert [journal.get(key) for key in "abc"] == [{"n": 1}, None, {"n": 3}]


KILLED = """
import os, sys
from megatron_rl.data.journal import Journal
journal = Journal(sys.argv[1], {})
for number in range(10**6):
    journal.put(str(number), {"n": "x" * 500})
    os.write(1, f"{number}\\n".encode())
"""


def test_a_killed_process_has_lost_nothing_it_had_put(tmp_path: Path) -> None:
    writer = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path / "j")], stdout=subprocess.PIPE)
    assert writer.stdout is not None
    for _ in range(200):
        writer.stdout.readline()
    writer.kill()
    told = [b"199", *writer.stdout.read().split(b"\n")]
    writer.wait()
    last_told = int([line for line in told if line][-1])
    with Journal(tmp_path / "j", {}) as journal:
        assert len(journal) in (last_told + 1, last_told + 2)
        assert journal.get(str(last_told)) == {"n": "x" * 500}


def run(journal: Journal, jobs: Any, **options: Any) -> RunCounts:
    return asyncio.run(run_all(jobs, journal, **{"concurrency": 4, **options}))


def answering(
    key: str, asked: list[str], fault: Callable[[str], EndpointError | None] = lambda _: None
) -> tuple[str, Job]:
    async def job() -> dict[str, Any]:
        asked.append(key)
        await asyncio.sleep(0.001)
        if error := fault(key):
            raise error
        return {"of": key}

    return key, job


def test_failed_jobs_are_tried_again_by_the_next_run_and_finished_ones_are_not(tmp_path: Path) -> None:
    asked: list[str] = []
    keys = [str(i) for i in range(20)]

    def fault(key: str) -> EndpointError | None:
        return EndpointError(f"{key} failed", url="u") if int(key) % 5 == 3 else None

    seen: list[int] = []
    with Journal(tmp_path / "j", SETTINGS) as journal:
        jobs = (answering(key, asked, fault) for key in ["0", "0", "1", *keys[1:]])
        counts = run(journal, jobs, on_progress=lambda c: seen.append(c.seen))
        assert (counts.done, counts.failed, counts.found) == (16, 4, 2), "a key that comes twice is asked once"
        assert counts.error.endswith("failed") and sorted(seen) == list(range(1, 23))
    with Journal(tmp_path / "j", SETTINGS) as journal:
        asked.clear()
        counts = run(journal, (answering(key, asked) for key in keys))
        assert sorted(asked, key=int) == ["3", "8", "13", "18"]
        assert (counts.done, counts.failed, counts.found) == (4, 0, 16)
        assert all(journal.get(key) == {"of": key} for key in keys)


def test_jobs_are_made_as_they_are_started_and_so_many_run_at_a_time(tmp_path: Path) -> None:
    made, ended, running, most = 0, 0, 0, 0

    async def job() -> None:
        nonlocal ended, running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1
        ended += 1

    def jobs() -> Any:
        nonlocal made
        for number in range(40):
            made += 1
            assert made - ended <= 5 + 1
            yield str(number), job

    with Journal(tmp_path / "j", SETTINGS) as journal:
        counts = run(journal, jobs(), concurrency=5)
        assert counts.done == 40 and most == 5
        assert len(journal) == 0, "a job without a value leaves none"


@pytest.mark.parametrize("fatal", [True, False])
def test_where_nothing_can_succeed_the_run_ends_early(tmp_path: Path, fatal: bool) -> None:
    asked: list[str] = []

    def down(key: str) -> EndpointError:
        return EndpointError(f"{key}: down", url="u", fatal=fatal)

    with Journal(tmp_path / "j", SETTINGS) as journal:
        with pytest.raises(EndpointError, match="down"):
            run(journal, (answering(str(i), asked, down) for i in range(1000)), concurrency=4)
        assert len(asked) <= (4 if fatal else GIVE_UP_AFTER + 4)
        with pytest.raises(ZeroDivisionError):
            run(journal, iter([("a", lambda: 1 // 0)]))
