"""How errors reach people: what they can mend in one line, what we must mend with a traceback."""

import os
import sys
from collections.abc import Callable

from megatron_rl.config import ConfigError, DataError


def run_with_user_errors(action: Callable[[], None]) -> int:
    """Exit status of action: 0, or 2 after printing a user's error in one line (on rank 0 only)."""
    try:
        action()
    except (ConfigError, DataError) as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    return 0
