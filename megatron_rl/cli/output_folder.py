"""Whether a command can write where it was told to. Imports nothing heavy."""

import tempfile
from pathlib import Path

from megatron_rl.config import ConfigError


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
