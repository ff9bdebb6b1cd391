"""What surrounds a conversion: the platform it runs on, and whether its result is whole. Imports no Megatron."""

import json
from pathlib import Path

from megatron_rl.checkpoint.folders import META_NAME, STATE_NAME
from megatron_rl.config import ConfigError
from megatron_rl.distributed.device import Platform, PlatformKind, start_platform


def start_conversion(source: Path, kind: PlatformKind | None = None) -> Platform:
    """Starts the platform whose checkpoints are written or read: the experts' tensors have other names on each.

    kind None: what is recorded in source, else cpu. ConfigError when kind is another than that, or not to be had here.
    """
    meta = Path(source) / META_NAME
    recorded: PlatformKind | None = None
    if meta.is_file():
        recorded = json.loads(meta.read_text(encoding="utf-8")).get("platform")
    if kind and recorded and kind != recorded:
        raise ConfigError(
            f"--platform must be that of the checkpoint, got {kind}, but {source} was saved on {recorded}; "
            "leave the option out"
        )
    chosen: PlatformKind = kind or recorded or "cpu"
    try:
        return start_platform(chosen)
    except ConfigError as error:
        what = f"{source}, saved on {chosen}," if recorded else f"a checkpoint of platform {chosen}"
        raise ConfigError(
            f"{what} must be converted on a machine with a GPU and Transformer Engine, got: "
            f"{str(error).partition(';')[0]}; convert it where the run trains"
        ) from error


def tokenizer_note(target: Path) -> str | None:
    """What to do where the Hugging Face folder target was written without a tokenizer; None: nothing."""
    if (target / STATE_NAME).is_dir() or any(target.glob("tokenizer*")) or any(target.glob("vocab.*")):
        return None
    return (
        f"{target} has no tokenizer: a run's checkpoint holds none; copy it from the folder that model.path names, "
        "next time by --hf-source"
    )
