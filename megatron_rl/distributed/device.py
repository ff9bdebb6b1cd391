"""The platform a process computes on, always an explicit choice of the run file or the launcher."""

import importlib.util
import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

from megatron_rl.config import ConfigError

PlatformKind = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class Platform:
    """One process's device and the collectives back end that belongs to it."""

    kind: PlatformKind
    device: torch.device
    backend: Literal["gloo", "nccl"]


def start_platform(kind: PlatformKind) -> Platform:
    """Prepares this process for kind; call it before building groups or models.

    "cpu" patches Megatron-Core (distributed/megatron_on_cpu.py), a few seconds of import. "cuda" takes the device
    of LOCAL_RANK; ConfigError where there is none, or no Transformer Engine.
    """
    if kind == "cpu":
        from megatron_rl.distributed import megatron_on_cpu

        megatron_on_cpu.apply()
        return Platform(kind="cpu", device=torch.device("cpu"), backend="gloo")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    check_platform(kind, num_ranks=local_rank + 1)
    torch.cuda.set_device(local_rank)
    return Platform(kind="cuda", device=torch.device("cuda", local_rank), backend="nccl")


def check_platform(kind: PlatformKind, *, num_ranks: int) -> None:
    """ConfigError if this machine cannot run so many ranks on kind."""
    if kind == "cpu":
        return
    num_gpus = torch.cuda.device_count()
    if num_ranks > num_gpus:
        raise ConfigError(
            f"platform cuda needs one GPU per local rank, got {num_gpus} GPUs for {num_ranks} ranks; "
            "set platform: cpu or start fewer ranks per node"
        )
    if importlib.util.find_spec("transformer_engine") is None:
        raise ConfigError(
            "platform cuda needs Transformer Engine and found none; install requirements/gpu.txt or set platform: cpu"
        )


def init_process_group(platform: Platform, timeout_s: float = 600.0) -> None:
    """Joins the world torchrun describes; without torchrun, a world of one on a free loopback port.

    A collective that waits longer than timeout_s raises on every rank.
    """
    if dist.is_initialized():
        return
    timeout = timedelta(seconds=timeout_s)
    if "RANK" in os.environ:
        dist.init_process_group(platform.backend, timeout=timeout)
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    dist.init_process_group(
        platform.backend, init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1, timeout=timeout
    )
