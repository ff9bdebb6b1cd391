"""Imports Megatron once, then runs a tiny training scenario on two forked ranks per patch that is left out.

Prints JSON: {name of the patch left out, "" for none: what went wrong on a rank, "" for nothing}.
"""

import json
import os
import signal
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_rl.distributed import megatron_on_cpu

megatron_on_cpu.import_megatron()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.tensor_parallel import get_cuda_rng_tracker  # noqa: E402

from megatron_rl.checkpoint.convert import load_hf  # noqa: E402
from megatron_rl.distributed.device import Platform  # noqa: E402
from megatron_rl.distributed.groups import ParallelConfig, ParallelGroups, build_groups  # noqa: E402
from megatron_rl.model.build import ModelConfig, build_model  # noqa: E402
from megatron_rl.model.forward import DeviceBatch, head_logprobs  # noqa: E402
from megatron_rl.model.pipeline import run_microbatches  # noqa: E402
from megatron_rl.trainer.config import OptimizerConfig  # noqa: E402
from megatron_rl.trainer.optim import PolicyOptimizer  # noqa: E402

PLATFORM = Platform(kind="cpu", device=torch.device("cpu"), backend="gloo")
NEEDS_PIPELINE = ("pipeline_buffers", "schedule_counter")
TENSOR, PIPELINE = ParallelConfig(tensor=2), ParallelConfig(pipeline=2)


def train_one_step(folder: Path, dtype: str, parallel: ParallelConfig, groups: ParallelGroups) -> None:
    """Forward, backward, reduction, clipping and update."""
    model = build_model(ModelConfig(path=str(folder), dtype=dtype), parallel, groups, PLATFORM)  # type: ignore[arg-type]
    load_hf(model, folder, groups)
    policy = PolicyOptimizer(model, groups, OptimizerConfig(lr=1e-3, clip_grad=1e-3))
    ids = torch.arange(8)
    batch = DeviceBatch(ids, ids + 1, torch.tensor([0, 3, 8], dtype=torch.int32), (3, 5))

    def score(hidden: torch.Tensor, _number: int) -> tuple[torch.Tensor, None]:
        return head_logprobs(policy.ddp, hidden, batch, groups).logp.sum(), None

    policy.zero_grad()
    run_microbatches(policy.ddp, [batch, batch], score, groups, train=True)
    policy.step(1e-3, step=0)


def first_draws_per_rank(groups: ParallelGroups) -> list[float]:
    """What each tensor-parallel rank would initialise a sharded weight with."""
    with get_cuda_rng_tracker().fork():  # type: ignore[union-attr]
        draw = torch.empty(1).normal_()
    draws = [torch.empty(1) for _ in range(2)]
    dist.all_gather(draws, draw, group=groups.tp_group)
    return [float(value) for value in draws]


def scenario(rank: int, meeting: str, folder: Path, left_out: str) -> None:
    megatron_on_cpu.apply(leave_out=[left_out])
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=2, timeout=timedelta(seconds=30)
    )
    groups = build_groups(TENSOR, PLATFORM, seed=3)
    draws = first_draws_per_rank(groups)
    assert draws[0] != draws[1], f"tensor-parallel ranks draw the same initial weights: {draws}"
    if left_out not in NEEDS_PIPELINE:
        train_one_step(folder, "float32", TENSOR, groups)
    if left_out in ("", "bf16_master_weights"):
        train_one_step(folder, "bfloat16", TENSOR, groups)
    if left_out in ("", *NEEDS_PIPELINE):
        parallel_state.destroy_model_parallel()
        train_one_step(folder, "float32", PIPELINE, build_groups(PIPELINE, PLATFORM, seed=3))


def fork_rank(rank: int, meeting: str, folder: Path, left_out: str, report: Path) -> int:
    child = os.fork()
    if child:
        return child
    try:
        scenario(rank, meeting, folder, left_out)
        os._exit(0)
    except BaseException as error:
        trace = traceback.extract_tb(error.__traceback__)
        report.write_text(f"{type(error).__name__}: {error} [{trace[-1].filename}]")
        os._exit(1)


def run(folder: Path, left_out: str) -> str:
    """The first failure of either rank; the other one is then stopped."""
    with tempfile.TemporaryDirectory() as work:
        reports = [Path(work) / f"rank{rank}" for rank in range(2)]
        children = {fork_rank(r, f"{work}/meeting", folder, left_out, reports[r]) for r in range(2)}
        deadline = time.monotonic() + 60
        while children:
            child, status = os.waitpid(-1, os.WNOHANG)
            if child:
                children.discard(child)
            if (child and status) or time.monotonic() > deadline:
                for other in children:
                    os.kill(other, signal.SIGKILL)
                    os.waitpid(other, 0)
                children = set()
            time.sleep(0.01)
        texts = [report.read_text() for report in reports if report.exists()]
        return texts[0] if texts else "" if time.monotonic() < deadline else "timeout"


if __name__ == "__main__":
    torch.set_num_threads(1)
    outcome = {name: run(Path(sys.argv[1]), name) for name in ("", *megatron_on_cpu.PATCHES)}
    Path(sys.argv[2]).write_text(json.dumps(outcome))
