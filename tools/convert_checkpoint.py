#!/usr/bin/env python
"""Convert Hugging Face weights to a Megatron checkpoint, or a checkpoint back to a Hugging Face folder.

One layer is in memory at a time; ranks of torchrun share the layers. Every parallel layout reads the result.
    python tools/convert_checkpoint.py SOURCE TARGET
    torchrun --nproc-per-node 8 tools/convert_checkpoint.py SOURCE TARGET
"""

import sys
from pathlib import Path
from typing import Annotated

import torch.distributed as dist
import typer

from megatron_rl.checkpoint.config import Direction
from megatron_rl.checkpoint.conversion import start_conversion, tokenizer_note
from megatron_rl.distributed.device import PlatformKind


def main(
    source: Annotated[Path, typer.Argument(help="Hugging Face folder, Megatron checkpoint, or a run's checkpoint.")],
    target: Annotated[Path, typer.Argument(help="Folder to write.")],
    direction: Annotated[Direction | None, typer.Option(help="Default: what source can be converted to.")] = None,
    hf_source: Annotated[Path | None, typer.Option(help="Folder whose tokenizer and companions go along.")] = None,
    platform: Annotated[
        PlatformKind | None,
        typer.Option(
            help="That of the runs which write or read the checkpoint; default: as recorded in SOURCE, or cpu."
        ),
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16; default: that of the source.")] = None,
) -> None:
    """Convert weights tensor by tensor; the target appears whole or not at all."""
    kind = start_conversion(source, platform).kind
    # Importing Megatron is faster, and quieter, after the platform was chosen.
    from megatron_rl.checkpoint.convert import convert

    convert(source, target, direction=direction, hf_source=hf_source, platform_kind=kind, dtype=dtype)
    if dist.get_rank() == 0:
        print(target)
        if note := tokenizer_note(target):
            print(f"note: {note}", file=sys.stderr)
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
