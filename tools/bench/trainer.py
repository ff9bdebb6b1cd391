"""Run by torchrun: one layout after the other, our trainer's step and the plain loop's in turn.

trainer.py MODEL_FOLDER OUT_FILE ROUNDS LAYOUT...; rank 0 writes a list of rows.
"""

import copy
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import documents
import plain_loop
import torch
import torch.distributed as dist

MAX_LOSS_GAP = {"float32": 1e-4, "bfloat16": 0.05}
"""Both sides start from the same weights, so the first step's losses may differ by rounding only, in nats."""


@dataclass(frozen=True)
class Layout:
    """Parallel sizes, microbatches per data-parallel rank, threads per process."""

    dtype: str = "float32"
    sizes: tuple[tuple[str, int], ...] = ()
    microbatches: int = 1
    threads: int = 1

    @property
    def replicas(self) -> int:
        """Data-parallel ranks."""
        sizes = dict(self.sizes)
        return dist.get_world_size() // (sizes.get("tensor", 1) * sizes.get("pipeline", 1) * sizes.get("context", 1))


LAYOUTS = {
    "1 process": Layout(),
    "1 process, bfloat16": Layout(dtype="bfloat16"),
    "1 process, 2 threads": Layout(threads=2),
    "DP2": Layout(),
    "DP2, bfloat16": Layout(dtype="bfloat16"),
    "EP2": Layout(sizes=(("expert", 2),)),
    "ETP2": Layout(sizes=(("expert_tensor", 2),)),
    "TP2": Layout(sizes=(("tensor", 2),)),
    "TP2, EP2": Layout(sizes=(("tensor", 2), ("expert", 2))),
    "PP2, 4 microbatches": Layout(sizes=(("pipeline", 2),), microbatches=4),
    "CP2": Layout(sizes=(("context", 2),)),
}


def our_step(model_path: Path, layout: Layout, steps: list[Any], groups: Any, platform: Any) -> plain_loop.Step:
    """The trainer's own step function on packed batches."""
    from megatron_rl.checkpoint.convert import load_hf
    from megatron_rl.data.packing import pack_for_ranks
    from megatron_rl.distributed.config import ParallelConfig
    from megatron_rl.loss.head import sft_loss
    from megatron_rl.model.build import build_model
    from megatron_rl.model.config import ModelConfig
    from megatron_rl.telemetry.values import Sum
    from megatron_rl.trainer.config import OptimizerConfig
    from megatron_rl.trainer.optim import PolicyOptimizer
    from megatron_rl.trainer.step import train_step

    model = build_model(
        ModelConfig(path=str(model_path), dtype=layout.dtype),  # type: ignore[arg-type]
        ParallelConfig(**dict(layout.sizes)),
        groups,
        platform,
    )
    load_hf(model, model_path, groups)
    beta1, beta2 = plain_loop.BETAS
    config = OptimizerConfig(lr=plain_loop.LR, beta1=beta1, beta2=beta2, clip_grad=plain_loop.CLIP)
    policy = PolicyOptimizer(model, groups, config)
    ways = layout.replicas * layout.microbatches
    largest = max(sum(len(sample.token_ids) for sample in samples) for samples in steps)
    packed = [
        pack_for_ranks(
            samples,
            capacity=-(-largest // ways // 64) * 64 + 64,
            data_parallel_size=layout.replicas,
            pad_multiple=groups.tp_size,
            pad_id=0,
        )[groups.dp_rank]
        for samples in steps
    ]
    totals = [documents.num_trained(samples) for samples in steps]

    def step(number: int) -> float:
        torch.set_num_threads(layout.threads)
        index = number % len(packed)

        def loss(out: Any, batch: Any) -> tuple[torch.Tensor, dict[str, Any]]:
            value = sft_loss(out.logp, torch.tensor(batch.loss_mask), denominator=totals[index])
            return value, {"loss": Sum(float(value.detach()))}

        _, metrics = train_step(
            policy, packed[index], loss, groups, step=number, lr=plain_loop.LR, device=platform.device
        )
        share = torch.tensor(metrics["loss"].result())
        dist.all_reduce(share, group=groups.dp_group)
        return float(share)

    return step


def their_steps(models: dict[str, Any], layout: Layout, steps: list[Any]) -> dict[str, plain_loop.Step]:
    """The plain loops to compare with: in rank 0 alone with a thread per core that ours uses, and one rank a process.

    For bfloat16 both ways to have it: weights in bfloat16, and float32 weights under autocast.
    """
    variants = [("float32", False)] if layout.dtype == "float32" else [("bfloat16", False), ("float32", True)]
    cores, found = dist.get_world_size() * layout.threads, {}
    for dtype, autocast in variants:
        name = "autocast" if autocast else f"{dtype} weights"
        model = models[dtype]
        if dist.get_rank() == 0:
            alone = plain_loop.plain_step(copy.deepcopy(model), steps, autocast=autocast, threads=cores)
        else:
            alone = _wait
        found[f"1 process/{name}"] = alone
        if dist.get_world_size() > 1:
            found[f"DDP/{name}"] = plain_loop.plain_step(copy.deepcopy(model), steps, autocast=autocast, ddp=True)
    return found


def _wait(_number: int) -> float:
    return math.nan


def timed(step: Callable[[int], float], number: int) -> tuple[float, float]:
    """(seconds until the last rank is done, loss)."""
    dist.barrier()
    started = time.perf_counter()
    loss = step(number)
    dist.barrier()
    return time.perf_counter() - started, loss


def measure(layout: Layout, ours: plain_loop.Step, theirs: dict[str, plain_loop.Step], rounds: int) -> dict[str, Any]:
    """Median seconds of each side and the median of the pairwise ratios, after one warm-up over all steps."""
    first = {name: [timed(step, number)[1] for number in range(documents.NUM_STEPS)] for name, step in theirs.items()}
    our_first = [timed(ours, number)[1] for number in range(documents.NUM_STEPS)]
    if dist.get_rank() == 0:
        for name, losses in first.items():
            gap = abs(losses[0] - our_first[0])
            assert gap < MAX_LOSS_GAP[layout.dtype], f"{name} starts at loss {losses[0]}, ours at {our_first[0]}"
    seconds: dict[str, list[float]] = {"ours": [], **{name: [] for name in theirs}}
    for number in range(rounds):
        seconds["ours"].append(timed(ours, number)[0])
        for name, step in theirs.items():
            seconds[name].append(timed(step, number)[0])
    return {
        "seconds": {name: statistics.median(values) for name, values in seconds.items()},
        "ratio": {
            name: statistics.median(t / o for t, o in zip(seconds[name], seconds["ours"], strict=True))
            for name in theirs
        },
    }


def main() -> None:
    model_path, out, rounds, names = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
    dtypes = {dtype for name in names for dtype in ("float32", LAYOUTS[name].dtype)}
    # Before Megatron's patches of torch.cuda, under which transformers would leave RoPE's frequencies unset.
    models = {dtype: plain_loop.load_model(model_path, getattr(torch, dtype)) for dtype in dtypes}
    from megatron_rl.distributed.config import ParallelConfig
    from megatron_rl.distributed.device import init_process_group, start_platform

    platform = start_platform("cpu")
    init_process_group(platform)
    from megatron.core import parallel_state

    from megatron_rl.distributed.groups import build_groups

    steps = documents.steps_of_samples()
    rows = []
    for name in names:
        layout = LAYOUTS[name]
        groups = build_groups(ParallelConfig(**dict(layout.sizes)), platform, seed=0)
        ours = our_step(model_path, layout, steps, groups, platform)
        rows.append({"layout": name, **measure(layout, ours, their_steps(models, layout, steps), rounds)})
        parallel_state.destroy_model_parallel()
    if dist.get_rank() == 0:
        tokens = statistics.mean(sum(len(sample.token_ids) for sample in samples) for samples in steps)
        out.write_text(json.dumps({"tokens": tokens, "rows": rows}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
