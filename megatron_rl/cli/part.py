"""One supervised command of a run, before and after its start."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.cli.keeper import RUN_MARK
from megatron_rl.cli.log_tail import last_lines


@dataclass(frozen=True)
class Part:
    """One supervised command."""

    name: str
    argv: list[str]
    env: dict[str, str]
    """Added to this process's environment."""
    log_path: Path
    """Standard output and error are appended here."""
    ready: "Callable[[PartHandle], None] | None" = None
    """Blocks until the part serves, in a thread of its own; raises if it never will. Must return once it has died."""
    finishes: bool = False
    """Expected to end by itself with status 0. The run is over when all such parts have."""
    saves: bool = False
    """Saves its state when asked to end. The other parts, which it may need for that, are stopped after it."""
    wave: int = 0
    """Parts of one wave start together, and only when every part of the lower waves is ready."""


class PartHandle:
    """A started part. Safe to use from any thread."""

    def __init__(self, part: Part, run_id: str) -> None:
        self.part = part
        self.name = part.name
        self.log_path = part.log_path
        self.started_s = time.monotonic()
        part.log_path.parent.mkdir(parents=True, exist_ok=True)
        # setproctitle, which vLLM uses, would overwrite the environment's mark without SPT_NOENV.
        marks = {RUN_MARK: run_id, "SPT_NOENV": "1"}
        with part.log_path.open("ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "megatron_rl.cli.keeper", part.name, *part.argv],
                env={**os.environ, "PYTHONUNBUFFERED": "1", **part.env, **marks},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Process id of the part's keeper, also its process group."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the part has not ended."""
        return self.poll() is None

    def poll(self) -> int | None:
        """None while the part runs, then its exit status, negative for a signal."""
        return self._process.poll()

    def last_lines(self) -> list[str]:
        """The end of what the part has logged since it was started."""
        return last_lines(self.log_path, start=self._log_start)

    def terminate(self) -> None:
        """Asks the part to end, after it has saved if it does that."""
        self._process.terminate()

    def end(self) -> None:
        """Asks the part to end now. SIGHUP, which ends a part that takes SIGTERM as the wish to save first."""
        self._process.send_signal(signal.SIGHUP if self.part.saves else signal.SIGTERM)

    def abandon(self) -> None:
        """Has the keeper kill the part and everything below it."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def kill_group(self) -> None:
        """Kills what a killed keeper left in its process group, or the keeper with its group if it will not end."""
        status = self.poll()
        if status is not None and status >= 0:
            return
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
