"""Process groups of one run, built once and passed to whoever communicates."""

from dataclasses import dataclass

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from megatron_rl.distributed.config import ParallelConfig, check_world
from megatron_rl.distributed.device import Platform

__all__ = ["ParallelConfig", "ParallelGroups", "Place", "build_groups", "check_world"]


@dataclass(frozen=True)
class Place:
    """Where a rank stands. Non-expert weights are cut over (tp, pp), the experts over (etp, ep, pp).

    Ranks that differ in cp only see parts of the same documents; ranks that differ in dp see other documents.
    """

    tp: int
    cp: int
    dp: int
    pp: int
    etp: int
    ep: int
    edp: int
    """Among the ranks with the same experts."""


@dataclass(frozen=True)
class ParallelGroups:
    """This rank's groups and its place in each. Ranks of one tp_group, cp_group or pp_group serve the same batch."""

    pg: ProcessGroupCollection
    places: tuple[Place, ...]
    """Of every global rank."""
    rank: int
    world_size: int

    @property
    def place(self) -> Place:
        """This rank's."""
        return self.places[self.rank]

    @property
    def tp_group(self) -> dist.ProcessGroup:
        """Tensor parallel."""
        return self.pg.tp

    @property
    def cp_group(self) -> dist.ProcessGroup:
        """Context parallel."""
        return self.pg.cp

    @property
    def dp_group(self) -> dist.ProcessGroup:
        """Data parallel, one rank per copy of the model and batch: without context parallelism."""
        return self.pg.dp

    @property
    def pp_group(self) -> dist.ProcessGroup:
        """Pipeline parallel."""
        return self.pg.pp

    @property
    def ep_group(self) -> dist.ProcessGroup:
        """Expert parallel."""
        return self.pg.ep

    @property
    def tp_rank(self) -> int:
        return self.place.tp

    @property
    def tp_size(self) -> int:
        return self.pg.tp.size()

    @property
    def cp_rank(self) -> int:
        return self.place.cp

    @property
    def cp_size(self) -> int:
        return self.pg.cp.size()

    @property
    def dp_rank(self) -> int:
        return self.place.dp

    @property
    def dp_size(self) -> int:
        return self.pg.dp.size()

    @property
    def pp_rank(self) -> int:
        return self.place.pp

    @property
    def pp_size(self) -> int:
        return self.pg.pp.size()

    @property
    def ep_rank(self) -> int:
        return self.place.ep

    @property
    def ep_size(self) -> int:
        return self.pg.ep.size()

    @property
    def etp_rank(self) -> int:
        return self.place.etp

    @property
    def etp_size(self) -> int:
        return self.pg.expt_tp.size()

    @property
    def is_first_stage(self) -> bool:
        """Holds the embedding."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Holds the head."""
        return self.pp_rank == self.pp_size - 1


def build_groups(config: ParallelConfig, platform: Platform, *, seed: int) -> ParallelGroups:
    """Cuts the initialised world into groups and seeds Megatron's random states. Collective; once per process.

    ConfigError when the world does not divide. Neighbouring ranks are tensor parallel.
    """
    world_size = dist.get_world_size()
    check_world(config, world_size)
    assert dist.get_backend() == platform.backend, f"world runs {dist.get_backend()}, platform {platform.backend}"
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor,
        pipeline_model_parallel_size=config.pipeline,
        context_parallel_size=config.context,
        expert_model_parallel_size=config.expert,
        expert_tensor_parallel_size=config.expert_tensor,
        create_gloo_process_groups=False,
    )
    model_parallel_cuda_manual_seed(seed)
    pg = ProcessGroupCollection.use_mpu_process_groups()
    place = Place(
        tp=pg.tp.rank(),
        cp=pg.cp.rank(),
        dp=pg.dp.rank(),
        pp=pg.pp.rank(),
        etp=pg.expt_tp.rank(),
        ep=pg.ep.rank(),
        edp=pg.expt_dp.rank(),
    )
    places: list[Place] = [place] * world_size
    dist.all_gather_object(places, place)
    return ParallelGroups(pg=pg, places=tuple(places), rank=dist.get_rank(), world_size=world_size)
