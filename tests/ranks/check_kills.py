"""Run alone: saves are killed at random moments; each next process goes on from the newest complete checkpoint.

Imports Megatron once and forks per kill. A child proves that what it resumes from is what was saved, bit by bit, then
trains and saves until it is killed. Arguments: HF folder, work folder, number of kills.
"""

import hashlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from megatron_rl.distributed.device import Platform, init_process_group, start_platform

PLATFORM: Platform = start_platform("cpu")

from megatron_rl.checkpoint.convert import load_hf  # noqa: E402
from megatron_rl.checkpoint.folders import checkpoint_step, checkpoints, latest_checkpoint  # noqa: E402
from megatron_rl.checkpoint.resume import CheckpointConfig, load_training_state  # noqa: E402
from megatron_rl.checkpoint.writer import CheckpointWriter  # noqa: E402
from megatron_rl.distributed.groups import ParallelConfig, build_groups  # noqa: E402
from megatron_rl.model.build import ModelConfig, build_model  # noqa: E402
from megatron_rl.trainer.config import OptimizerConfig  # noqa: E402
from megatron_rl.trainer.optim import PolicyOptimizer  # noqa: E402


def digest(policy: PolicyOptimizer) -> bytes:
    """Of weights and moments."""
    sha = hashlib.sha256()
    states = [state for part in policy.optimizer.chained_optimizers for state in part.optimizer.state.values()]
    for tensor in [*policy.ddp.module.parameters(), *(state[key] for state in states for key in sorted(state))]:
        sha.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest().encode()


def change(policy: PolicyOptimizer, step: int) -> None:
    """A step on random gradients."""
    generator = torch.Generator().manual_seed(step)
    policy.zero_grad()
    for parameter in policy.ddp.module.parameters():
        parameter.main_grad.normal_(generator=generator)  # type: ignore[attr-defined]
    policy.step(1e-2, step=step)


def train_and_save(folder: Path, work: Path, asynchronous: bool, ready: int) -> None:
    """Writes a byte to ready before each save."""
    init_process_group(PLATFORM)
    groups = build_groups(ParallelConfig(), PLATFORM, seed=1)
    model = build_model(ModelConfig(path=str(folder)), ParallelConfig(), groups, PLATFORM)
    latest = latest_checkpoint(work)
    if latest is None:
        load_hf(model, folder, groups)
    policy = PolicyOptimizer(model, groups, OptimizerConfig())
    state: dict[str, Any] = dict(model=model, optimizer=policy.optimizer)
    step = 0
    if latest is not None:
        step, extra = load_training_state(latest, groups=groups, **state)
        assert step == checkpoint_step(latest) and extra["digest"] == digest(policy), f"{latest} is not what was saved"
    config = CheckpointConfig(every_steps=1, keep_last=2, keep_every_steps=5, asynchronous=asynchronous)
    writer = CheckpointWriter(work, groups, config)
    while True:
        change(policy, step)
        step += 1
        os.write(ready, b"!")
        writer.save(step, extra={"digest": digest(policy)}, **state)
        writer.wait()
        os.write(ready, b".")


def kill_once(folder: Path, work: Path, asynchronous: bool, save_s: float) -> float:
    """Kills a child at a random moment of its second save; returns the seconds its first one took."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            train_and_save(folder, work, asynchronous, write)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    os.close(write)
    assert os.read(read, 1) == b"!", "the child resumes and starts to save"
    started = time.monotonic()
    assert os.read(read, 1) == b".", "the first save succeeds"
    took_s = time.monotonic() - started
    assert os.read(read, 1) == b"!", "the child trains on"
    time.sleep(random.uniform(0, 1.2 * max(save_s, took_s)))
    os.kill(child, signal.SIGKILL)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1]), "the child was killed, it did not fail"
    os.close(read)
    return took_s


def main() -> None:
    folder, work, num_kills = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    random.seed(0)
    torch.set_num_threads(1)
    save_s, interrupted, newest = 0.0, 0, 0
    for kill in range(num_kills):
        save_s = kill_once(folder, work / "checkpoints", kill % 2 == 1, save_s)
        interrupted += any(path.name.endswith(".partial") for path in (work / "checkpoints").iterdir())
        steps = [checkpoint_step(path) for path in checkpoints(work / "checkpoints")]
        assert steps[-1] > newest, f"killed after step {newest}, {steps} are left"
        assert all(step in steps for step in range(5, steps[-1], 5)), f"every fifth step is kept, got {steps}"
        newest = steps[-1]
    (work / "kills.json").write_text(json.dumps({"interrupted": interrupted, "newest": newest}))


if __name__ == "__main__":
    main()
