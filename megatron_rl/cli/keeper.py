"""Runs one part of a run and ends whatever it leaves behind: python -m megatron_rl.cli.keeper NAME COMMAND...

Invariant: when a keeper has ended, so has every process below it. A keeper adopts its orphans (subreaper), so a
process that left the session is still below it. Standard input is a pipe held by the supervisor alone: its end means
that the supervisor is gone or out of patience, and everything below is killed at once.
A keeper that is itself killed takes the part's leader with it; the mark in the environment finds the others.
"""

import ctypes
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable

import psutil

RUN_MARK = "MEGATRON_RL_RUN_ID"
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_TICK_S = 0.1
_KILL_TIMEOUT_S = 5.0
_CANNOT_START = 127
_libc = ctypes.CDLL(None, use_errno=True)


def kill_marked(run_id: str, *, timeout_s: float = _KILL_TIMEOUT_S) -> list[int]:
    """Kills every other process that carries the run's mark; returns the ids of those that would not end."""
    return _kill_until_gone(lambda: _marked(run_id), timeout_s)


def keep(argv: list[str], *, run_id: str) -> int:
    """Runs argv to its end and kills what it left; returns its exit status, negative for a signal."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        leader = _start(argv)
    except OSError as error:
        print(f"cannot start {argv[0]}: {error.strerror}", file=sys.stderr, flush=True)
        return _CANNOT_START
    for signum in _FORWARDED:
        signal.signal(signum, lambda number, _frame: _send(leader, number))
    returncode = None
    abandoned = False
    while returncode is None and not abandoned:
        abandoned = bool(select.select([sys.stdin.fileno()], [], [], _TICK_S)[0])
        returncode = _reap().get(leader)
    for signum in _FORWARDED:
        signal.signal(signum, signal.SIG_IGN)
    _kill_until_gone(_descendants, _KILL_TIMEOUT_S)
    if abandoned:
        # Keepers of other parts are doing the same; only then is what still carries the mark nobody's.
        time.sleep(1)
        kill_marked(run_id)
    return -signal.SIGKILL if returncode is None else returncode


def _start(argv: list[str]) -> int:
    keeper = os.getpid()

    def die_with_keeper() -> None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != keeper:
            os._exit(_CANNOT_START)

    # A keeper has one thread, so code between fork and exec is safe here (it would not be in the supervisor).
    process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, preexec_fn=die_with_keeper)
    return process.pid


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def _send(pid: int, signum: int) -> None:
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        return


def _reap() -> dict[int, int]:
    """Exit statuses of the children, adopted ones included, that have ended since the last call."""
    ended = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended[pid] = os.waitstatus_to_exitcode(status)


def _descendants() -> list[psutil.Process]:
    _reap()
    return psutil.Process().children(recursive=True)


def _marked(run_id: str) -> list[psutil.Process]:
    def carries_mark(process: psutil.Process) -> bool:
        try:
            return process.environ().get(RUN_MARK) == run_id
        except (psutil.Error, OSError):
            return False

    return [process for process in psutil.process_iter() if process.pid != os.getpid() and carries_mark(process)]


def _kill_until_gone(find: Callable[[], Iterable[psutil.Process]], timeout_s: float) -> list[int]:
    """Kills what find returns until it returns nothing: processes may still be forking."""
    deadline = time.monotonic() + timeout_s
    while processes := list(find()):
        if time.monotonic() > deadline:
            return [process.pid for process in processes]
        for process in processes:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        time.sleep(0.02)
    return []


def _end_like(returncode: int) -> None:
    """Ends this process as its part ended, by the same signal if it was one."""
    if returncode >= 0:
        sys.exit(returncode)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if -returncode not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(-returncode, signal.SIG_DFL)
    os.kill(os.getpid(), -returncode)
    sys.exit(128 - returncode)


if __name__ == "__main__":
    _end_like(keep(sys.argv[2:], run_id=os.environ[RUN_MARK]))
