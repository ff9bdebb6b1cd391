"""Run by torchrun. straight: four steps, saving after two; resumed: a new process loads that and makes the last two."""

import hashlib
import json
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.distributed.device import init_process_group, start_platform

PLATFORM = start_platform("cpu")

from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.tensor_parallel import get_cuda_rng_tracker  # noqa: E402

from megatron_rl.checkpoint.convert import load_hf  # noqa: E402
from megatron_rl.checkpoint.resume import (  # noqa: E402
    CheckpointConfig,
    latest_checkpoint,
    load_training_state,
    save_training_state,
)
from megatron_rl.config import ConfigError  # noqa: E402
from megatron_rl.distributed.groups import ParallelConfig, ParallelGroups, build_groups  # noqa: E402
from megatron_rl.model.build import ModelConfig, build_model  # noqa: E402
from megatron_rl.model.forward import DeviceBatch, taken_logprobs  # noqa: E402
from megatron_rl.model.hf_weights import export_hf  # noqa: E402
from megatron_rl.model.policy import PolicyModel  # noqa: E402

Layout = tuple[ParallelConfig, Literal["float32", "bfloat16"]]
LAYOUTS: dict[int, dict[str, Layout]] = {
    1: {"single": (ParallelConfig(), "float32"), "single_bf16": (ParallelConfig(), "bfloat16")},
    2: {
        "dp2": (ParallelConfig(), "float32"),
        "ep2": (ParallelConfig(expert=2), "float32"),
        "tp2": (ParallelConfig(tensor=2), "float32"),
    },
}
CONFIG = CheckpointConfig(every_steps=2, keep_last=1)


class Trainer:
    """A model, its optimizer and batches that depend on the step and the data-parallel rank only."""

    def __init__(self, model_path: Path, layout: Layout) -> None:
        parallel, dtype = layout
        self.groups: ParallelGroups = build_groups(parallel, PLATFORM, seed=1)
        self.model: PolicyModel = build_model(
            ModelConfig(path=str(model_path), dtype=dtype),
            parallel,
            self.groups,
            PLATFORM,
        )
        self.model_path, self.bf16 = model_path, dtype == "bfloat16"

    def start(self) -> MegatronOptimizer:
        """Wraps the model as it is now."""
        self.ddp = DistributedDataParallel(
            self.model.config,
            DistributedDataParallelConfig(grad_reduce_in_fp32=True),
            self.model,
            pg_collection=self.groups.pg,
        )
        config = OptimizerConfig(
            optimizer="adam", lr=1e-2, clip_grad=0.5, bf16=self.bf16, params_dtype=self.model.config.params_dtype
        )
        self.optimizer = get_megatron_optimizer(
            config, [self.ddp], use_gloo_process_groups=False, pg_collection=self.groups.pg
        )
        return self.optimizer

    def step(self, number: int) -> float:
        generator = torch.Generator().manual_seed(100 * number + self.groups.dp_rank)
        ids, targets = (torch.randint(0, 512, (40,), generator=generator) for _ in range(2))
        batch = DeviceBatch(ids, targets, torch.tensor([0, 13, 40], dtype=torch.int32), (13, 27))
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss = -taken_logprobs(self.ddp, batch, self.groups).logp.sum() / 80
        loss.backward()
        finalize_model_grads([self.ddp], pg_collection=self.groups.pg)
        self.optimizer.step()
        return loss.item()

    def record(self, losses: list[float]) -> dict[str, Any]:
        """What must be equal bit by bit."""
        digest = hashlib.sha256()
        for _, tensor in export_hf(self.model, self.groups):
            if tensor is not None:
                digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        draws = [random.random(), float(np.random.rand()), float(torch.rand(1))]
        with get_cuda_rng_tracker().fork():  # type: ignore[union-attr]
            draws.append(float(torch.rand(1)))
        per_rank: list[Any] = [None] * self.groups.world_size
        dist.all_gather_object(per_rank, (losses, draws))
        return {"weights": digest.hexdigest(), "losses_and_draws": per_rank}


class DieWhenRead(dict):
    """Extra state whose writing kills the process."""

    def items(self) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


def straight(layout: Layout, root: Path, checkpoints: Path) -> dict[str, Any]:
    trainer = Trainer(root / "plain", layout)
    load_hf(trainer.model, root / "plain", trainer.groups)
    optimizer = trainer.start()
    losses = [trainer.step(0)]
    for generator in (random.seed, np.random.seed, torch.manual_seed):
        generator(40 + trainer.groups.rank)
    save: dict[str, Any] = dict(model=trainer.model, optimizer=optimizer, groups=trainer.groups, config=CONFIG)
    save_training_state(checkpoints, step=1, extra={}, **save)
    losses.append(trainer.step(1))
    save_training_state(checkpoints, step=2, extra={"data": b"\x00state"}, **save)
    losses += [trainer.step(2), trainer.step(3)]
    return trainer.record(losses[2:])


def resumed(layout: Layout, root: Path, checkpoints: Path) -> dict[str, Any]:
    trainer = Trainer(root / "plain", layout)
    optimizer = trainer.start()
    latest = latest_checkpoint(checkpoints)
    assert latest is not None
    step, extra = load_training_state(latest, model=trainer.model, optimizer=optimizer, groups=trainer.groups)
    record = trainer.record([trainer.step(2), trainer.step(3)])
    folders = sorted(path.name for path in checkpoints.iterdir())
    return {**record, "step": step, "extra": extra["data"].decode(), "folders": folders}


def under_another_layout(root: Path, checkpoints: Path, layout: Layout) -> list[float]:
    """This rank's losses of the last two steps under a layout that did not write the checkpoint."""
    trainer = Trainer(root / "plain", layout)
    load_training_state(
        checkpoints / "step_000002", model=trainer.model, optimizer=trainer.start(), groups=trainer.groups
    )
    return [trainer.step(2), trainer.step(3)]


def with_another_model(root: Path, checkpoints: Path) -> str:
    trainer = Trainer(root / "tied", LAYOUTS[1]["single"])
    try:
        load_training_state(
            checkpoints / "step_000002", model=trainer.model, optimizer=trainer.start(), groups=trainer.groups
        )
    except ConfigError as error:
        return str(error)
    return "loaded"


def die_while_saving(root: Path, checkpoints: Path) -> None:
    """One complete checkpoint, then this process is killed in the middle of the second."""
    trainer = Trainer(root / "plain", LAYOUTS[1]["single"])
    load_hf(trainer.model, root / "plain", trainer.groups)
    save: dict[str, Any] = dict(model=trainer.model, optimizer=trainer.start(), groups=trainer.groups, config=CONFIG)
    trainer.step(0)
    save_training_state(checkpoints, step=1, extra={}, **save)
    save_training_state(checkpoints, step=2, extra=DieWhenRead(), **save)


def main() -> None:
    mode, root, work = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    init_process_group(PLATFORM)
    world_size = dist.get_world_size()
    results: dict[str, Any] = {}
    for name, layout in LAYOUTS[world_size].items():
        run = {"straight": straight, "resumed": resumed}[mode]
        results[name] = run(layout, root, work / name)
        parallel_state.destroy_model_parallel()
    if mode == "resumed" and world_size == 2:
        results["ep2_as_dp2"] = under_another_layout(root, work / "ep2", LAYOUTS[2]["dp2"])
        parallel_state.destroy_model_parallel()
        tensor_and_expert = ParallelConfig(tensor=2, expert=2)
        results["tp2_as_tp2_ep2"] = under_another_layout(root, work / "tp2", (tensor_and_expert, "float32"))
    if mode == "resumed" and world_size == 1:
        results["another_model"] = with_another_model(root, work / "single")
    if dist.get_rank() == 0:
        (work / f"{mode}-{world_size}.json").write_text(json.dumps(results))
    if mode == "straight" and world_size == 1:
        die_while_saving(root, work / "killed")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
