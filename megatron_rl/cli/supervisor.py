"""Starts the processes of a run, watches them, and ends them all.

Invariant: when Supervisor.run has returned or raised, no process of the run is left; if the supervisor itself is
killed, each part's keeper sees to it. Linux only.
"""

import fcntl
import os
import shutil
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from megatron_rl.cli.keeper import kill_marked
from megatron_rl.cli.part import Part, PartHandle
from megatron_rl.config import ConfigError

_KEEPER_END_S = 6.0
_DYING_S = 1.0
_FULL_DISK_BYTES = 2**20
SAVE_S = 300.0
"""How long a part may save after a SIGTERM; torchrun needs it too (TORCH_ELASTIC_SHUTDOWN_TIMEOUT)."""
_SAVE_AFTER_CTRL_C_S = 15.0
_RESUME = "start the same command again to resume from the last checkpoint"


class RunFailed(Exception):
    """A part died or never got ready. The message names it, its log with the last lines, and the cure."""

    def __init__(self, handle: PartHandle, what: str, *, cure: str, also: Sequence[str] = ()) -> None:
        self.part = handle.name
        self.returncode = handle.poll()
        self.log_path = handle.log_path
        self.last_lines = handle.last_lines()
        if str(self.log_path) in what:
            shown = []
        elif self.last_lines:
            shown = [f"last lines of {self.log_path}:", *(f"  | {line}" for line in self.last_lines)]
        else:
            shown = [f"it wrote nothing to {self.log_path}"]
        others = [f"ended at the same time: {', '.join(also)}"] if also else []
        super().__init__("\n".join([f"{self.part} {what}", *shown, *others, f"{cure}; {_RESUME}"]))


class RunStopped(SystemExit):
    """A signal ended the run. As an exit it carries the shell's status for it: 130 for Ctrl-C, 143 for SIGTERM."""

    def __init__(self, signum: int, running: Sequence[str]) -> None:
        super().__init__(128 + signum)
        cause = "Ctrl-C" if signum == signal.SIGINT else signal.Signals(signum).name
        self.message = f"{cause} stopped {', '.join(running) or 'the run'}; {_RESUME}"

    def __str__(self) -> str:
        return self.message


class Supervisor:
    """Starts parts wave by wave, watches them, and stops all when the run is over, a part dies or a signal comes."""

    def __init__(
        self,
        parts: Sequence[Part],
        *,
        grace_s: float = 10.0,
        poll_s: float = 0.2,
        on_status: Callable[[str], None] | None = None,
    ) -> None:
        """grace_s is how long a part may take to end when asked to; a second signal cuts it short."""
        names = [part.name for part in parts]
        if len(set(names)) != len(names):
            raise ValueError(f"parts must have different names, got {names}")
        self._parts = sorted(parts, key=lambda part: part.wave)
        self._grace_s = grace_s
        self._poll_s = poll_s
        self._on_status = on_status or (lambda _text: None)
        self._run_id = uuid.uuid4().hex
        self._handles: list[PartHandle] = []
        self._signals: list[int] = []

    def run(self) -> None:
        """Returns when every finishing part has ended with 0. Raises RunFailed, or RunStopped after a signal.

        Signals are caught only in the main thread; the progress display may run in another.
        """
        with _caught_signals(self._signals):
            try:
                for wave in sorted({part.wave for part in self._parts}):
                    self._start([part for part in self._parts if part.wave == wave])
                while not self._finished():
                    self._check()
                    time.sleep(self._poll_s)
            finally:
                self._stop()
            if self._signals:
                raise RunStopped(self._signals[0], [])

    def _start(self, parts: list[Part]) -> None:
        checks = []
        for part in parts:
            self._tell(f"starting {part.name}")
            handle = PartHandle(part, self._run_id)
            self._handles.append(handle)
            if part.ready is not None:
                checks.append(_ReadyCheck(handle, part.ready))
        while checks:
            self._check()
            for check in [check for check in checks if check.done]:
                self._judge(check)
                checks.remove(check)
            time.sleep(self._poll_s)

    def _judge(self, check: "_ReadyCheck") -> None:
        handle = check.handle
        if check.error is None:
            self._tell(f"{handle.name} ready after {time.monotonic() - handle.started_s:.0f} s")
            return
        # A check often fails on a part that is just dying: its status says more than a refused connection.
        _wait(lambda: not handle.alive, _DYING_S)
        self._check()
        what = f"did not become ready: {check.error}"
        raise RunFailed(handle, what, cure="mend what its log shows") from check.error

    def _finished(self) -> bool:
        finishing = [part.name for part in self._parts if part.finishes]
        ended = [handle.name for handle in self._handles if handle.part.finishes and handle.poll() == 0]
        return bool(finishing) and len(ended) == len(finishing)

    def _check(self) -> None:
        """Raises for a signal or for the part that died first; of two found at once, for one killed by a signal."""
        if self._signals:
            raise RunStopped(self._signals[0], [handle.name for handle in self._handles if handle.alive])
        dead = [(handle, status) for handle in self._handles if (status := handle.poll()) is not None]
        dead = [(handle, status) for handle, status in dead if status != 0 or not handle.part.finishes]
        if not dead or self._finished():
            return
        dead.sort(key=lambda entry: entry[1] >= 0)
        handle, status = dead[0]
        also = [f"{other.name} ({_ending(code)}, log {other.log_path})" for other, code in dead[1:]]
        seconds = time.monotonic() - handle.started_s
        raise RunFailed(
            handle, f"died ({_ending(status)}) {seconds:.0f} s after its start", cure=_cure(handle, status), also=also
        )

    def _tell(self, text: str) -> None:
        """A status that a full disk does not take must not keep the run from being stopped."""
        with suppress(OSError):
            self._on_status(text)

    def _let_save(self) -> None:
        """After a signal: parts that save end first. A person at the keyboard waits less; a second signal ends it."""
        saving = [handle for handle in self._handles if handle.alive and handle.part.saves]
        if not self._signals or not saving:
            return
        self._tell(f"{', '.join(handle.name for handle in saving)} saves and ends")
        signals_before = len(self._signals)
        for handle in saving:
            handle.terminate()
        patience_s = _SAVE_AFTER_CTRL_C_S if self._signals[0] == signal.SIGINT else SAVE_S
        _wait(lambda: _all_ended(saving) or len(self._signals) > signals_before, patience_s)

    def _stop(self) -> None:
        self._let_save()
        running = [handle for handle in self._handles if handle.alive]
        if running:
            self._tell(f"stopping {', '.join(handle.name for handle in running)}")
        signals_before = len(self._signals)
        for handle in running:
            handle.end()
        _wait(lambda: _all_ended(running) or len(self._signals) > signals_before, self._grace_s)
        for handle in self._handles:
            handle.abandon()
        _wait(lambda: _all_ended(self._handles), _KEEPER_END_S)
        for handle in self._handles:
            handle.kill_group()
        stuck = kill_marked(self._run_id)
        if stuck:
            self._tell(f"could not end processes {stuck}; the system holds them")


@dataclass
class _ReadyCheck:
    """A readiness check on its way, in a daemon thread so that nothing waits for it once the run has failed."""

    handle: PartHandle
    ready: Callable[[PartHandle], None]
    error: BaseException | None = None
    _thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._run, name=f"ready-{self.handle.name}", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self.ready(self.handle)
        except BaseException as error:
            self.error = error


class RunLock:
    """Holds a run folder for one supervisor. The system frees it when the process ends, however it ends."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / "run.lock"
        self._file: IO[str] | None = None

    def __enter__(self) -> Self:
        """Raises ConfigError naming the process that holds the folder."""
        file = self._path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            file.close()
            raise ConfigError(
                f"a run folder serves one run at a time, and {self._path.parent} is held by process {holder}; "
                "wait for it, stop it, or choose another run.dir"
            ) from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        self._file = file
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


@contextmanager
def _caught_signals(received: list[int]) -> Iterator[None]:
    """Appends the signals that end a run to received instead of acting on them. No-op outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        caught.append(signal.SIGHUP)
    before = {signum: signal.signal(signum, lambda number, _frame: received.append(number)) for signum in caught}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _ending(status: int) -> str:
    return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"


def _cure(handle: PartHandle, status: int) -> str:
    """What to do about a part that died; a full disk is named here, as the log may lie on it."""
    if shutil.disk_usage(handle.log_path.parent).free < _FULL_DISK_BYTES:
        return f"the disk of {handle.log_path.parent} is full: make room"
    if status == -signal.SIGKILL:
        return "if nobody killed it, the machine ran out of memory (dmesg tells): make the run smaller"
    return "mend what its log shows"


def _all_ended(handles: Sequence[PartHandle]) -> bool:
    return not any(handle.alive for handle in handles)


def _wait(condition: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
