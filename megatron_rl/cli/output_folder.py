"""Whether a command can write where it was told to. Imports nothing heavy."""

import errno
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_rl.config import ConfigError, RunError

_OF_THE_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EIO}
_RUST_OS_ERROR = re.compile(r"\(os error (\d+)\)")
"""How the writers of tokenizers and safetensors pass an error on, as no OSError."""


def check_folder(folder: Path, option: str) -> None:
    """Makes the folder; ConfigError naming the option if nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
            file.flush()
    except OSError as error:
        raise ConfigError(
            f"{option} must be a folder that can be made and written, got {folder} ({error.strerror}); "
            "choose another, or make room or change permissions there"
        ) from error


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """RunError naming the folder where its disk takes no more or refuses; any other error passes as it is."""
    try:
        yield
    except Exception as error:
        if (reason := disk_problem(error)) is None:
            raise
        raise RunError(
            f"{folder} must be written whole, got: {reason}; make room or change permissions there, then start again"
        ) from error


def disk_problem(error: Exception) -> str | None:
    """What a disk says when it is full, broken, or closed to this user; None for errors of another kind."""
    if isinstance(error, OSError):
        number = error.errno
    else:
        found = _RUST_OS_ERROR.search(str(error))
        number = int(found[1]) if found else None
    return os.strerror(number) if number in _OF_THE_DISK else None
