"""What reaches the supervisor from outside: Ctrl-C, SIGTERM, kill -9; and the lock on the run folder."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from megatron_rl.cli.supervisor import RunLock
from megatron_rl.config import ConfigError

# Every process has the marker on its command line: two keepers, two leaders, two children of the second leader.
SUPERVISE = """
import sys
from pathlib import Path
from megatron_rl.cli.supervisor import Part, RunStopped, Supervisor
marker, folder, grace_s = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])
polite = '''
import pathlib, signal, sys, time
def end(*_): print("asked to end", flush=True); raise SystemExit
signal.signal(signal.SIGTERM, end)
pathlib.Path(sys.argv[2], "polite").touch()
time.sleep(60)
'''
tree = '''
import pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sleep = [sys.executable, "-c", "import sys, time; open(sys.argv[1], 'w').close(); time.sleep(60)"]
names = [sys.argv[2] + "/" + name for name in ("child", "cleared")]
subprocess.Popen([*sleep, names[0], sys.argv[1]])
subprocess.Popen([*sleep, names[1], sys.argv[1]], env={}, start_new_session=True)
while not all(pathlib.Path(name).exists() for name in names): time.sleep(0.01)
pathlib.Path(sys.argv[2], "tree").touch()
time.sleep(60)
'''
parts = [Part(name, [sys.executable, "-c", code, marker, str(folder)], {}, folder / (name + ".log"), finishes=True)
         for name, code in (("trainer", polite), ("engine", tree))]
try:
    Supervisor(parts, grace_s=grace_s, poll_s=0.05, on_status=lambda text: print(text, flush=True)).run()
except RunStopped as stop:
    print(stop, flush=True)
    raise
"""
NUM_PROCESSES = 7


def marked(marker: str) -> list[psutil.Process]:
    """The marker's processes that have not ended."""
    return [
        process
        for process in psutil.process_iter(["cmdline", "status"])
        if any(marker in word for word in process.info["cmdline"] or [])
        and process.info["status"] != psutil.STATUS_ZOMBIE
    ]


@contextmanager
def supervised(folder: Path, *, grace_s: float) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A supervisor in a process of its own, whose parts are all up; and the marker of its processes."""
    marker = uuid.uuid4().hex
    process = subprocess.Popen(
        [sys.executable, "-c", SUPERVISE, marker, str(folder), str(grace_s)], stdout=subprocess.PIPE, text=True
    )
    try:
        deadline = time.monotonic() + 10
        while not ((folder / "polite").exists() and (folder / "tree").exists()):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        assert len(marked(marker)) == NUM_PROCESSES
        yield process, marker
    finally:
        for left in marked(marker):
            left.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("signum", "status", "cause"), [(signal.SIGINT, 130, "Ctrl-C"), (signal.SIGTERM, 143, "SIGTERM")]
)
def test_signal_asks_parts_to_end_then_kills_them_and_says_how_to_resume(
    tmp_path: Path, signum: int, status: int, cause: str
) -> None:
    with supervised(tmp_path, grace_s=1.0) as (process, marker):
        process.send_signal(signum)
        output, _ = process.communicate(timeout=10)
        assert marked(marker) == []
    assert process.returncode == status
    assert (tmp_path / "trainer.log").read_text() == "asked to end\n"
    assert output.splitlines()[-1] == (
        f"{cause} stopped trainer, engine; start the same command again to resume from the last checkpoint"
    )


SAVING = """
import sys
from pathlib import Path
from megatron_rl.cli.supervisor import Part, Supervisor
folder = Path(sys.argv[1])
trainer = '''
import pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
def save(*_):
    time.sleep(1)
    (folder / "saved").write_text(str((folder / "service ended").exists()))
    raise SystemExit(143)
signal.signal(signal.SIGTERM, save)
(folder / "trainer").touch()
time.sleep(60)
'''
service = '''
import pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
def end(*_): (folder / "service ended").touch(); raise SystemExit
signal.signal(signal.SIGTERM, end)
(folder / "service").touch()
time.sleep(60)
'''
def part(name, code, **more):
    return Part(name, [sys.executable, "-c", code, str(folder)], {}, folder / (name + ".log"), finishes=True, **more)
failing = [part("failing", "import time; time.sleep(2); raise SystemExit(3)")] if "fail" in sys.argv else []
Supervisor([part("trainer", trainer, saves=True), part("service", service), *failing], grace_s=5, poll_s=0.05).run()
"""


def saving_run(folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """A supervisor whose trainer takes SIGTERM as the wish to save, once both of its parts are up."""
    process = subprocess.Popen([sys.executable, "-c", SAVING, str(folder), *arguments], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 20
    while not ((folder / "trainer").exists() and (folder / "service").exists()):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    return process


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_what_saves_ends_before_what_it_may_need_for_that(tmp_path: Path, signum: int) -> None:
    process = saving_run(tmp_path)
    process.send_signal(signum)
    assert process.wait(15) == 128 + signum
    assert (tmp_path / "saved").read_text() == "False", "the service still ran"
    assert (tmp_path / "service ended").exists()


def test_after_a_failure_of_another_part_nothing_is_saved(tmp_path: Path) -> None:
    """What the saving part would ask may be what has failed: SIGHUP ends it at once."""
    assert saving_run(tmp_path, "fail").wait(20) == 1
    assert not (tmp_path / "saved").exists()


def test_second_ctrl_c_does_not_wait_for_the_grace_period(tmp_path: Path) -> None:
    with supervised(tmp_path, grace_s=60.0) as (process, marker):
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=10)
        assert marked(marker) == []
    assert process.returncode == 130


def test_killed_supervisor_takes_every_process_with_it(tmp_path: Path) -> None:
    with supervised(tmp_path, grace_s=60.0) as (process, marker):
        process.kill()
        _wait_until_left(marker, 0)
        assert marked(marker) == []


def test_supervisor_and_a_keeper_killed_at_once_leave_only_what_hides_its_environment_and_session(
    tmp_path: Path,
) -> None:
    with supervised(tmp_path, grace_s=60.0) as (process, marker):
        keepers = _keepers(marker)
        keepers["engine"].kill()
        process.kill()
        _wait_until_left(marker, 1)
        [hidden] = marked(marker)
        assert str(tmp_path / "cleared") in hidden.cmdline()


def test_leaders_die_with_their_keepers_when_nobody_is_left_to_kill_them(tmp_path: Path) -> None:
    with supervised(tmp_path, grace_s=60.0) as (process, marker):
        process.send_signal(signal.SIGSTOP)
        for keeper in _keepers(marker).values():
            keeper.kill()
        _wait_until_left(marker, 3)
        names = sorted(left.cmdline()[3].rsplit("/", 1)[-1] for left in marked(marker))
        assert names == sorted([marker, "child", "cleared"])  # the supervisor and what only it would have found
        process.kill()


def _keepers(marker: str) -> dict[str, psutil.Process]:
    commands = {process: process.cmdline() for process in marked(marker)}
    keepers = {words[3]: process for process, words in commands.items() if "megatron_rl.cli.keeper" in words}
    assert keepers.keys() == {"trainer", "engine"}
    return keepers


def _wait_until_left(marker: str, num_processes: int) -> None:
    deadline = time.monotonic() + 5
    while len(marked(marker)) > num_processes and time.monotonic() < deadline:
        time.sleep(0.05)


def test_run_folder_is_held_by_one_process_until_it_ends_however_it_ends(tmp_path: Path) -> None:
    code = (
        "import sys, time, pathlib; from megatron_rl.cli.supervisor import RunLock\n"
        "with RunLock(pathlib.Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    with pytest.raises(ConfigError, match=f"{tmp_path} is held by process {holder.pid}; .* choose another run.dir"):
        RunLock(tmp_path).__enter__()
    holder.kill()
    holder.communicate()
    with RunLock(tmp_path):
        assert (tmp_path / "run.lock").read_text() == f"{os.getpid()}\n"
        with pytest.raises(ConfigError, match=f"process {os.getpid()}"):
            RunLock(tmp_path).__enter__()
    with RunLock(tmp_path):
        pass
