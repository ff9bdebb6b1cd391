"""How errors reach people: what they can mend in one line, what we must mend with a traceback."""

import os
import sys
from collections.abc import Callable

from megatron_rl.config import ConfigError, DataError


def run_with_user_errors(action: Callable[[], None]) -> int:
    """Exit status of action: 0, or 2 after printing a user's error in one line, with the rank unless that is 0."""
    try:
        action()
    except (ConfigError, DataError) as error:
        rank = os.environ.get("RANK", "0")
        print(f"{'' if rank == '0' else f'rank {rank}: '}error: {error}", file=sys.stderr, flush=True)
        return 2
    return 0
