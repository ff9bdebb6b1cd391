"""Run alone: the most memory that a conversion takes, in bytes. Arguments: small HF folder, large one, folder.

Linux counts what a process has resident; its high-water mark is reset before the conversion and read after it, in a
process that has converted something small already. Files are read, not mapped, so no page of them is counted.
"""

import ctypes
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_rl.distributed.device import init_process_group, start_platform

PLATFORM = start_platform("cpu")

from megatron.core import parallel_state  # noqa: E402

from megatron_rl.checkpoint.convert import convert, load_hf  # noqa: E402
from megatron_rl.checkpoint.sharded import save_sharded  # noqa: E402
from megatron_rl.distributed.groups import ParallelConfig, build_groups  # noqa: E402
from megatron_rl.model.build import build_from_config  # noqa: E402
from megatron_rl.model.folder import read_hf_config  # noqa: E402


def resident(field: str) -> int:
    """Bytes: VmRSS now, or VmHWM since the last reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def whole(source: Path, target: Path) -> None:
    """A conversion that holds the model."""
    groups = build_groups(ParallelConfig(), PLATFORM, seed=0)
    model = build_from_config(read_hf_config(source), "float32", ParallelConfig(), groups, PLATFORM)
    load_hf(model, source, groups)
    target.mkdir()
    save_sharded(target, model, groups)


def peak(action: str, source: Path, target: Path) -> int:
    """Bytes beyond what was resident before."""
    ctypes.CDLL(None).malloc_trim(0)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    whole(source, target) if action == "whole" else convert(source, target)
    parallel_state.destroy_model_parallel()
    return resident("VmHWM") - before


def main() -> None:
    small, source, work = (Path(argument) for argument in sys.argv[1:4])
    torch.set_num_threads(1)
    init_process_group(PLATFORM)
    peaks = {}
    for action, origin, target in (
        ("streamed", source, "streamed"),
        ("streamed back", work / "streamed", "back"),
        ("whole", source, "whole"),
    ):
        start = small if origin == source else work / "small_streamed"
        peak(action, start, work / f"small_{target}")
        peaks[action] = peak(action, origin, work / target)
    (work / "peaks.json").write_text(json.dumps(peaks))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
