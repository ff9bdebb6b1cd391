"""How errors reach people: what they can mend in one line, what we must mend with a traceback."""

import os
import signal
import sys
from collections.abc import Callable

from megatron_rl.cli.output_folder import disk_problem
from megatron_rl.config import ConfigError, DataError, RunError, RunStop

STOPPED = 128 + signal.SIGTERM
"""Exit status of a process that a SIGTERM has ended, though it saved first."""


def run_with_user_errors(action: Callable[[], None]) -> int:
    """Exit status of action: 0, or 2 after one line on an error that a person can mend; ranks above 0 name theirs.

    A disk that is full or refuses is such an error where the file is known; elsewhere only the traceback tells it.
    A run that a signal has stopped says so once, on rank 0, and ends with 143.
    """
    rank = os.environ.get("RANK", "0")
    try:
        action()
    except (ConfigError, DataError, RunError) as error:
        return _told(error, rank)
    except OSError as error:
        reason = disk_problem(error)
        if reason is None or error.filename is None:
            raise
        cure = "make room or change permissions there"
        return _told(f"{error.filename} must be a file that can be used here, got: {reason}; {cure}", rank)
    except RunStop as stop:
        if rank == "0":
            print(stop, file=sys.stderr, flush=True)
        return STOPPED
    return 0


def _told(error: Exception | str, rank: str) -> int:
    print(f"{'' if rank == '0' else f'rank {rank}: '}error: {error}", file=sys.stderr, flush=True)
    return 2
