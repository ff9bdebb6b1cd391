"""Run by torchrun: breaks one rank's computation in several ways and records what every rank says and keeps."""

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.distributed.device import init_process_group, start_platform

PLATFORM = start_platform("cpu")

from megatron.core import parallel_state  # noqa: E402

from megatron_rl.checkpoint.convert import load_hf  # noqa: E402
from megatron_rl.config import RunError  # noqa: E402
from megatron_rl.distributed.groups import ParallelConfig, ParallelGroups, build_groups  # noqa: E402
from megatron_rl.loss.head import sft_loss  # noqa: E402
from megatron_rl.model.build import ModelConfig, build_model  # noqa: E402
from megatron_rl.records import PackedBatch  # noqa: E402
from megatron_rl.telemetry.values import Mean  # noqa: E402
from megatron_rl.trainer.config import OptimizerConfig  # noqa: E402
from megatron_rl.trainer.optim import PolicyOptimizer  # noqa: E402
from megatron_rl.trainer.step import train_step  # noqa: E402

STEP = 6
LAYOUTS = {
    "dp2": ParallelConfig(),
    "ep2": ParallelConfig(expert=2),
    "tp2": ParallelConfig(tensor=2),
    "pp2": ParallelConfig(pipeline=2),
}
LAST_PROJECTION = "decoder.layers.1.self_attention.linear_proj.weight"
LAST_EXPERTS = "decoder.layers.1.mlp.experts.linear_fc2_weight"
FINAL_NORM = "decoder.final_layernorm.weight"


def microbatches(groups: ParallelGroups) -> list[PackedBatch]:
    """Two of 32 tokens and two documents each, other tokens on every data-parallel rank."""
    random = np.random.default_rng(groups.dp_rank)
    return [
        PackedBatch(
            input_ids=random.integers(0, 512, 32).astype(np.int32),
            target_ids=random.integers(0, 512, 32).astype(np.int32),
            loss_mask=np.ones(32, dtype=bool),
            cu_seqlens=np.array([0, 20, 32], dtype=np.int32),
            sample_ids=[f"sample{groups.dp_rank}-{number}-{document}" for document in range(2)],
        )
        for number in range(2)
    ]


class Case:
    """A policy at its start, and one step of it that may go wrong."""

    def __init__(self, folder: Path, parallel: ParallelConfig, groups: ParallelGroups, **options: Any) -> None:
        self.groups = groups
        self.model = build_model(ModelConfig(path=str(folder)), parallel, groups, PLATFORM)
        load_hf(self.model, folder, groups)
        self.policy = PolicyOptimizer(self.model, groups, OptimizerConfig(**options))
        self.tensors: dict[str, Any] = dict(self.model.global_tensors())

    def step(self, loss: Callable[[Any, PackedBatch], Any] | None = None) -> dict[str, Any]:
        """What this rank says, whether its weights and the optimizer's state are as before, and its metrics."""
        weights, moments = self._weights(), self._moments()
        said, metrics, grad_norm = "", {}, math.nan
        try:
            grad_norm, metrics = train_step(
                self.policy,
                microbatches(self.groups),
                loss or plain_loss,
                self.groups,
                step=STEP,
                lr=1e-3,
                device=PLATFORM.device,
            )
        except RunError as error:
            said = str(error)
        return {
            "said": said,
            "unchanged": same(weights, self._weights()) and same(moments, self._moments()),
            "grad_norm": grad_norm,
            "metrics": {name: value.result() for name, value in metrics.items()},
        }

    def poison(self, name: str, values: list[float]) -> None:
        """The first gradient values of a parameter of this rank become these."""

        def write(grad: Tensor) -> Tensor:
            grad = grad.clone()
            grad.view(-1)[: len(values)] = torch.tensor(values)
            return grad

        self.tensors[name].register_hook(write)

    def _weights(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]

    def _moments(self) -> list[Tensor]:
        optimizers: list[Any] = self.policy.optimizer.chained_optimizers
        states = [state for optimizer in optimizers for state in optimizer.optimizer.state.values()]
        return [v.clone() for state in states for v in state.values() if torch.is_tensor(v)]


def plain_loss(out: Any, batch: PackedBatch) -> tuple[Tensor, dict[str, Any]]:
    loss = sft_loss(out.logp, torch.tensor(batch.loss_mask), denominator=128)
    return loss, {"loss/sft": Mean(float(loss.detach()), 1)}


def same(before: list[Tensor], after: list[Tensor]) -> bool:
    return len(before) == len(after) and all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def of_data_parallel(folder: Path, groups: ParallelGroups) -> dict[str, Any]:
    """Every way to go wrong, under plain data parallelism."""
    parallel, rank = LAYOUTS["dp2"], groups.rank
    good = Case(folder, parallel, groups)
    results = {"good": good.step()}
    broken = Case(folder, parallel, groups)
    broken.step()
    if rank == 1:
        broken.poison(LAST_PROJECTION, [math.nan, math.inf, -math.inf])
        broken.poison(LAST_EXPERTS, [math.nan])
    results["gradient"] = broken.step()

    forward = Case(folder, parallel, groups)
    if rank == 1:
        forward.model.decoder.layers[0].register_forward_hook(lambda _m, _i, out: (out[0] * math.nan, out[1]))
    results["activation"] = forward.step()

    def infinite_loss(out: Any, batch: PackedBatch) -> tuple[Tensor, dict[str, Any]]:
        loss, metrics = plain_loss(out, batch)
        return (loss * math.inf if batch.sample_ids[0] == "sample0-1-0" else loss), metrics

    results["loss"] = Case(folder, parallel, groups).step(infinite_loss)

    overflow = Case(folder, parallel, groups)
    overflow.poison(FINAL_NORM, [1e38] * 64)  # two microbatches on two ranks
    results["overflow"] = overflow.step()

    squares = Case(folder, parallel, groups)
    squares.poison(FINAL_NORM, [1e30] * 64)
    results["squares"] = squares.step()

    spiky = Case(folder, parallel, groups, clip_grad=1e-7, skip_above_norm=1e-6)
    for number in range(10):
        results[f"skip{number}"] = spiky.step()
    results["not_skipped"] = Case(folder, parallel, groups, skip_above_norm=1e6).step()
    return results


def of_layout(name: str, folder: Path, groups: ParallelGroups) -> dict[str, Any]:
    """A good step, and one with a broken gradient on rank 1 only."""
    results = {"good": Case(folder, LAYOUTS[name], groups).step()}
    broken = Case(folder, LAYOUTS[name], groups)
    if groups.rank == 1:
        broken.poison({"ep2": LAST_EXPERTS, "tp2": LAST_PROJECTION, "pp2": LAST_PROJECTION}[name], [math.nan])
    results["gradient"] = broken.step()
    return results


def main() -> None:
    folder, work = Path(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    init_process_group(PLATFORM)
    results = {}
    for name, parallel in LAYOUTS.items():
        groups = build_groups(parallel, PLATFORM, seed=1)
        results[name] = of_data_parallel(folder, groups) if name == "dp2" else of_layout(name, folder, groups)
        parallel_state.destroy_model_parallel()
    (work / f"guards{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
