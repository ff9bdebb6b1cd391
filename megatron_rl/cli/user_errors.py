"""How errors reach people: what they can mend in one line, what we must mend with a traceback."""

import os
import sys
from collections.abc import Callable

from megatron_rl.config import ConfigError, DataError, RunError


def run_with_user_errors(action: Callable[[], None]) -> int:
    """Exit status of action: 0, or 2 after one line on an error that a person can mend; ranks above 0 name theirs."""
    try:
        action()
    except (ConfigError, DataError, RunError) as error:
        rank = os.environ.get("RANK", "0")
        print(f"{'' if rank == '0' else f'rank {rank}: '}error: {error}", file=sys.stderr, flush=True)
        return 2
    return 0
