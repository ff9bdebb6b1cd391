"""Process groups of one run, built once and passed to whoever communicates."""

from dataclasses import dataclass

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from megatron_rl.config import ConfigError
from megatron_rl.distributed.config import ParallelConfig
from megatron_rl.distributed.device import Platform

__all__ = ["ParallelConfig", "ParallelGroups", "build_groups"]


@dataclass(frozen=True)
class ParallelGroups:
    """This rank's groups and its place in each. Ranks of one tp_group see the same tokens."""

    pg: ProcessGroupCollection
    tp_group: dist.ProcessGroup
    dp_group: dist.ProcessGroup
    ep_group: dist.ProcessGroup
    tp_rank: int
    tp_size: int
    dp_rank: int
    dp_size: int
    ep_rank: int
    ep_size: int
    rank: int
    world_size: int

    @property
    def tp_ranks(self) -> list[int]:
        """Global ranks of this rank's tensor-parallel group, in shard order."""
        return dist.get_process_group_ranks(self.tp_group)

    @property
    def ep_ranks(self) -> list[int]:
        """Global ranks of this rank's expert-parallel group, in expert order."""
        return dist.get_process_group_ranks(self.ep_group)


def build_groups(config: ParallelConfig, platform: Platform, *, seed: int) -> ParallelGroups:
    """Cuts the initialised world into groups and seeds Megatron's random states. Collective; once per process.

    ConfigError when the world does not divide. Neighbouring ranks are tensor parallel.
    """
    world_size = dist.get_world_size()
    if world_size % config.tensor or world_size % config.expert:
        raise ConfigError(
            f"the number of ranks must be a multiple of parallel.tensor and of parallel.expert, got {world_size} ranks "
            f"for tensor={config.tensor} and expert={config.expert}; change the launcher's rank count or these sizes"
        )
    assert dist.get_backend() == platform.backend, f"world runs {dist.get_backend()}, platform {platform.backend}"
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor,
        expert_model_parallel_size=config.expert,
        expert_tensor_parallel_size=1,
        create_gloo_process_groups=False,
    )
    model_parallel_cuda_manual_seed(seed)
    pg = ProcessGroupCollection.use_mpu_process_groups()
    return ParallelGroups(
        pg=pg,
        tp_group=pg.tp,
        dp_group=pg.dp,
        ep_group=pg.ep,
        tp_rank=pg.tp.rank(),
        tp_size=pg.tp.size(),
        dp_rank=pg.dp.rank(),
        dp_size=pg.dp.size(),
        ep_rank=pg.ep.rank(),
        ep_size=pg.ep.size(),
        rank=dist.get_rank(),
        world_size=world_size,
    )
