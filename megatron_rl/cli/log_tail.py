"""The lines of a part's log that say why it died."""

import re
from pathlib import Path

_MAX_BYTES = 65_536
_MAX_CHARACTERS = 400
# torchrun ends the log of a failed rank with a traceback and a table of its own, which say nothing more than this line.
_RANK_FAILED = re.compile(r"torch/distributed/elastic/.*\] failed \(exitcode:")


def last_lines(path: Path, *, start: int = 0, count: int = 15) -> list[str]:
    """At most count lines from the end of the log, none of them from before byte start.

    Long lines are cut, and of a progress bar only what was last shown stays.
    """
    try:
        with path.open("rb") as log:
            size = log.seek(0, 2)
            log.seek(max(start, size - _MAX_BYTES))
            text = log.read().decode("utf-8", errors="replace")
    except OSError:
        return []
    lines = [line.rstrip("\r").rsplit("\r", 1)[-1].rstrip() for line in text.split("\n")]
    lines = [line[:_MAX_CHARACTERS] for line in lines if line.strip()]
    for index, line in enumerate(lines):
        if _RANK_FAILED.search(line):
            lines = lines[: index + 1]
            break
    return lines[-count:]
