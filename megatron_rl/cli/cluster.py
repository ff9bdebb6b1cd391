"""Which nodes a run takes, and which of its process groups cross from one node to another."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_rl.cli.addresses import engine_place
from megatron_rl.cli.runs import RlRun, RunConfig
from megatron_rl.config import ConfigError
from megatron_rl.distributed.config import ParallelConfig


@dataclass(frozen=True)
class Cluster:
    """The machines a dry run is about."""

    gpus_per_node: int = 8
    gpu_memory_gib: float | None = None
    """Memory of one GPU; None: the estimate is shown and compared with nothing."""


def trainer_nodes(run: RunConfig, cluster: Cluster) -> int:
    """Nodes of the trainer. ConfigError when its ranks do not fill them alike, as torchrun has it."""
    nodes, rest = divmod(run.processes, cluster.gpus_per_node)
    if nodes and rest:
        raise ConfigError(
            f"ranks must fill their nodes, got run.processes={run.processes} for nodes of {cluster.gpus_per_node} "
            "(--gpus-per-node); change one of them"
        )
    return nodes or 1


def engine_nodes(run: RlRun, cluster: Cluster) -> int:
    """Nodes of the engines alone; 0 where they share the trainer's. ConfigError for more than a node has room for."""
    per_node = cluster.gpus_per_node
    if not run.engine.urls:
        if run.run.platform == "cuda" and run.run.processes + run.engine.count > per_node:
            raise ConfigError(
                f"ranks and engines that one machine starts must fit its {per_node} GPUs (--gpus-per-node), got "
                f"run.processes={run.run.processes} and engine.count={run.engine.count}; lower one, or name engines of "
                "other machines in engine.urls"
            )
        return 0
    hosts = [engine_place(url)[0] for url in run.engine.urls]
    for host in hosts:
        if run.run.platform == "cuda" and hosts.count(host) > per_node:
            raise ConfigError(
                f"engines of one host must fit its {per_node} GPUs (--gpus-per-node), got {hosts.count(host)} of "
                f"engine.urls on {host}; move some to other hosts"
            )
    return len(set(hosts))


def groups_across_nodes(parallel: ParallelConfig, world_size: int, gpus_per_node: int) -> list[str]:
    """Names of the parallel dimensions of which some group has ranks on several nodes.

    Megatron's order of ranks: tensor, context, data, pipeline; for experts: expert_tensor, expert, their copies.
    """
    found = []
    for name, stride, size in _dimensions(parallel, world_size):
        starts = (r for r in range(world_size) if r // stride % size == 0)
        if any(start // gpus_per_node != (start + stride * (size - 1)) // gpus_per_node for start in starts):
            found.append(name)
    return found


def _dimensions(parallel: ParallelConfig, world_size: int) -> Iterator[tuple[str, int, int]]:
    """(name, distance between neighbours, size)"""
    stage = world_size // parallel.pipeline
    yield from _strided([("tensor", parallel.tensor), ("context", parallel.context)], "data", stage)
    yield from _strided([("expert_tensor", parallel.expert_tensor), ("expert", parallel.expert)], "expert data", stage)
    yield "pipeline", stage, parallel.pipeline


def _strided(sizes: Sequence[tuple[str, int]], rest: str, stage: int) -> Iterator[tuple[str, int, int]]:
    stride = 1
    for name, size in sizes:
        yield name, stride, size
        stride *= size
    yield rest, stride, stage // stride
