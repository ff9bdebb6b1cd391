"""Run by torchrun. straight: four steps, saving after two; resumed: a new process loads that and makes the last two."""

import hashlib
import json
import random
import shutil
import sys
import threading
import unittest.mock
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.distributed.device import init_process_group, start_platform

PLATFORM = start_platform("cpu")

from megatron.core import parallel_state  # noqa: E402
from megatron.core.tensor_parallel import get_cuda_rng_tracker  # noqa: E402

from megatron_rl.checkpoint import writer  # noqa: E402
from megatron_rl.checkpoint.adam import adam_optimizers  # noqa: E402
from megatron_rl.checkpoint.convert import load_hf  # noqa: E402
from megatron_rl.checkpoint.resume import CheckpointConfig, latest_checkpoint, load_training_state  # noqa: E402
from megatron_rl.config import ConfigError  # noqa: E402
from megatron_rl.distributed.groups import ParallelConfig, ParallelGroups, build_groups  # noqa: E402
from megatron_rl.model.build import ModelConfig, build_model  # noqa: E402
from megatron_rl.model.forward import DeviceBatch, head_logprobs  # noqa: E402
from megatron_rl.model.hf_weights import export_hf  # noqa: E402
from megatron_rl.model.pipeline import from_last_stage, run_microbatches  # noqa: E402
from megatron_rl.model.policy import PolicyModel  # noqa: E402
from megatron_rl.trainer.config import OptimizerConfig  # noqa: E402
from megatron_rl.trainer.optim import PolicyOptimizer  # noqa: E402

SINGLE, PP2, TP2 = ParallelConfig(), ParallelConfig(pipeline=2), ParallelConfig(tensor=2)


@dataclass(frozen=True)
class Case:
    """A layout, the model it trains, and how it saves."""

    parallel: ParallelConfig = SINGLE
    model: str = "plain"
    dtype: str = "float32"
    asynchronous: bool = False


CASES: dict[int, dict[str, Case]] = {
    1: {
        "single": Case(),
        "single_bf16": Case(dtype="bfloat16", asynchronous=True),
        "glm": Case(model="glm"),
        "glm_dense": Case(model="glm_dense"),
        "tied": Case(model="tied"),
    },
    2: {
        "dp2": Case(asynchronous=True),
        "dp2_bf16": Case(dtype="bfloat16"),
        "ep2": Case(ParallelConfig(expert=2)),
        "tp2": Case(TP2),
        "pp2": Case(PP2),
        "etp2": Case(ParallelConfig(tensor=2, expert_tensor=2)),
        "glm_tp2_ep2": Case(ParallelConfig(tensor=2, expert=2), model="glm"),
        "glm_dense_pp2": Case(PP2, model="glm_dense"),
        "tied_pp2": Case(PP2, model="tied", asynchronous=True),
    },
}
RESHARDED: dict[int, list[tuple[str, str]]] = {
    1: [
        ("tp2", "single"),
        ("ep2", "single"),
        ("dp2", "single"),
        ("dp2_bf16", "single_bf16"),
        ("pp2", "single"),
        ("etp2", "single"),
        ("glm_tp2_ep2", "glm"),
        ("glm_dense_pp2", "glm_dense"),
        ("tied_pp2", "tied"),
    ],
    2: [
        ("single", "tp2"),
        ("single", "ep2"),
        ("single", "pp2"),
        ("single", "etp2"),
        ("single_bf16", "dp2_bf16"),
        ("tp2", "pp2"),
        ("glm", "glm_tp2_ep2"),
        ("glm_dense", "glm_dense_pp2"),
        ("tied", "tied_pp2"),
    ],
}
"""(layout that wrote, layout that reads), by the number of ranks that read."""
CONFIG = CheckpointConfig(every_steps=2, keep_last=1)


class Trainer:
    """A model, its optimizer and batches that depend on the step only: four microbatches, shared by the copies."""

    def __init__(self, root: Path, case: Case) -> None:
        self.folder, self.case = root / case.model, case
        self.groups: ParallelGroups = build_groups(case.parallel, PLATFORM, seed=1)
        config = ModelConfig.model_validate({"path": str(self.folder), "dtype": case.dtype})
        self.model: PolicyModel = build_model(config, case.parallel, self.groups, PLATFORM)

    def start(self) -> None:
        """Wraps the model as it is now."""
        self.policy = PolicyOptimizer(self.model, self.groups, OptimizerConfig(lr=1e-2, clip_grad=0.5))

    def step(self, number: int) -> float:
        """The loss over all copies of the model."""
        batches = [_batch(4 * number + i) for i in range(self.groups.dp_rank, 4, self.groups.dp_size)]

        def score(hidden: Tensor, index: int) -> tuple[Tensor, Tensor]:
            logp = head_logprobs(self.policy.ddp, hidden, batches[index], self.groups).logp
            loss = -logp.sum() / 160
            return loss, loss.detach().double()

        self.policy.zero_grad()
        losses = run_microbatches(self.policy.ddp, batches, score, self.groups, train=True)
        self.policy.step(1e-2, step=number)
        total = torch.tensor(from_last_stage(sum(map(float, losses)), self.groups), dtype=torch.float64)
        dist.all_reduce(total, group=self.groups.dp_group)
        return float(total)

    def weights(self) -> dict[str, Tensor]:
        """HF tensors on rank 0."""
        return {name: tensor.clone() for name, tensor in export_hf(self.model, self.groups) if tensor is not None}

    def record(self, losses: list[float], weights: dict[str, Tensor]) -> dict[str, Any]:
        """What must be equal bit by bit."""
        states = [state for part in adam_optimizers(self.policy.optimizer) for state in part.optimizer.state.values()]
        moments = [tensor for state in states for _, tensor in sorted(state.items())]
        draws = [random.random(), float(np.random.rand()), float(torch.rand(1))]
        with get_cuda_rng_tracker().fork():  # type: ignore[union-attr]
            draws.append(float(torch.rand(1)))
        per_rank: list[Any] = [None] * self.groups.world_size
        dist.all_gather_object(per_rank, (losses, draws, _digest(moments)))
        return {"weights": _digest(list(weights.values())), "per_rank": per_rank}


def _batch(seed: int) -> DeviceBatch:
    generator = torch.Generator().manual_seed(seed)
    ids, targets = (torch.randint(0, 512, (40,), generator=generator) for _ in range(2))
    return DeviceBatch(ids, targets, torch.tensor([0, 13, 40], dtype=torch.int32), (13, 27))


def _digest(tensors: list[Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def straight(case: Case, root: Path, work: Path, name: str) -> dict[str, Any]:
    trainer = Trainer(root, case)
    load_hf(trainer.model, trainer.folder, trainer.groups)
    trainer.start()
    losses = [trainer.step(0)]
    for generator in (random.seed, np.random.seed, torch.manual_seed):
        generator(40 + trainer.groups.rank)
    config = CONFIG.model_copy(update={"asynchronous": case.asynchronous})
    trained = threading.Event()
    background = writer.CheckpointWriter(work / name, trainer.groups, config, model_path=trainer.folder)
    state: dict[str, Any] = dict(model=trainer.model, optimizer=trainer.policy.optimizer)
    background.save(1, extra={}, **state)
    losses.append(trainer.step(1))
    background.wait()
    with written_after(trained):
        background.save(2, extra={"data": b"\x00state"}, **state)
        losses += [trainer.step(2), trainer.step(3)]
        trained.set()
        background.wait()
    weights = trainer.weights()
    if trainer.groups.rank == 0:
        torch.save(weights, work / f"{name}.pt")
    return trainer.record(losses[2:], weights)


@contextmanager
def written_after(event: threading.Event) -> Iterator[None]:
    """Holds back every save in the background until the event: it is as slow as can be."""
    write = writer.write_snapshot

    def wait_and_write(*args: Any) -> Path:
        if threading.current_thread() is not threading.main_thread():
            event.wait()
        return write(*args)

    with unittest.mock.patch.object(writer, "write_snapshot", wait_and_write):
        yield


def resumed(case: Case, root: Path, work: Path, name: str) -> dict[str, Any]:
    trainer = Trainer(root, case)
    trainer.start()
    latest = latest_checkpoint(work / name)
    assert latest is not None
    step, extra = load_training_state(
        latest,
        model=trainer.model,
        optimizer=trainer.policy.optimizer,
        groups=trainer.groups,
        model_path=trainer.folder,
    )
    losses = [trainer.step(2), trainer.step(3)]
    folders = sorted(path.name for path in (work / name).iterdir())
    return {
        **trainer.record(losses, trainer.weights()),
        "step": step,
        "extra": extra["data"].decode(),
        "folders": folders,
    }


def resharded(written: str, case: Case, root: Path, work: Path) -> dict[str, float]:
    """Losses and weights next to those of the layout that wrote the checkpoint, relative."""
    trainer = Trainer(root, case)
    trainer.start()
    load_training_state(
        work / written / "step_000002",
        model=trainer.model,
        optimizer=trainer.policy.optimizer,
        groups=trainer.groups,
    )
    losses, weights = [trainer.step(2), trainer.step(3)], trainer.weights()
    world = 1 if written in CASES[1] else 2
    straight_losses = json.loads((work / f"straight-{world}.json").read_text())[written]["per_rank"][0][0]
    expected = torch.load(work / f"{written}.pt") if weights else {}
    errors = [
        float((weights[name] - exact).double().norm() / exact.double().norm()) for name, exact in expected.items()
    ]
    return {
        "losses": max(abs(got / exact - 1) for got, exact in zip(losses, straight_losses, strict=True)),
        "weights": max(errors, default=0.0),
    }


def with_another_model(root: Path, work: Path) -> str:
    trainer = Trainer(root, replace(CASES[1]["single"], model="tied"))
    trainer.start()
    return refusal(trainer, work / "single" / "step_000002", None)


def of_something_else(root: Path, work: Path) -> dict[str, str]:
    trainer, saved = Trainer(root, CASES[1]["single"]), work / "single" / "step_000002"
    trainer.start()
    tokenizer, of_gpus = work / "other_tokenizer", work / "of_gpus" / "step_000002"
    tokenizer.mkdir()
    (tokenizer / "tokenizer_config.json").write_text('{"pad_token": "<other>"}')
    shutil.copytree(saved, of_gpus)
    meta = json.loads((saved / "meta.json").read_text())
    (of_gpus / "meta.json").write_text(json.dumps({**meta, "platform": {"cpu": "cuda"}[meta["platform"]]}))
    return {
        "another_tokenizer": refusal(trainer, saved, tokenizer),
        "another_platform": refusal(trainer, of_gpus, None),
    }


def refusal(trainer: Trainer, checkpoint: Path, model_path: Path | None) -> str:
    try:
        load_training_state(
            checkpoint,
            model=trainer.model,
            optimizer=trainer.policy.optimizer,
            groups=trainer.groups,
            model_path=model_path,
        )
    except ConfigError as error:
        return str(error)
    return "loaded"


def main() -> None:
    mode, root, work = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    init_process_group(PLATFORM)
    world_size = dist.get_world_size()
    results: dict[str, Any] = {}
    for name, case in CASES[world_size].items():
        run = {"straight": straight, "resumed": resumed}[mode]
        results[name] = run(case, root, work, name)
        parallel_state.destroy_model_parallel()
    if mode == "resumed":
        for written, read in RESHARDED[world_size]:
            results[f"{written} as {read}"] = resharded(written, CASES[world_size][read], root, work)
            parallel_state.destroy_model_parallel()
    if mode == "resumed" and world_size == 1:
        results["another_model"] = with_another_model(root, work)
        parallel_state.destroy_model_parallel()
        results |= of_something_else(root, work)
    if dist.get_rank() == 0:
        (work / f"{mode}-{world_size}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
