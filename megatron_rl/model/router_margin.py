"""How close routers came to choosing other experts: where a difference of one rounding can change a whole layer."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_rl.distributed.groups import ParallelGroups
from megatron_rl.model.policy import PolicyModel


class RouterMargins:
    """Filled by the forward inside watch_routers."""

    def __init__(self) -> None:
        self.of_layer: list[Tensor] = []

    def smallest(self, groups: ParallelGroups) -> Tensor:
        """Per token the smallest margin over all MoE layers, float32 [T]. Collective over the tensor-parallel group.

        The margin is the gap between the last chosen and the first rejected expert's router logit.
        """
        assert self.of_layer, "the model ran inside watch_routers and has MoE layers"
        mine = torch.stack(self.of_layer).amin(0)
        shards = [torch.empty_like(mine) for _ in range(groups.tp_size)]
        dist.all_gather(shards, mine, group=groups.tp_group)
        return torch.cat(shards)


@contextmanager
def watch_routers(model: PolicyModel) -> Iterator[RouterMargins]:
    """Records the margins of every router of model during one forward; costs one small product per layer.

    A router that takes every expert has no other choice: its margin is infinite.
    """
    margins = RouterMargins()
    top_k = model.config.moe_router_topk

    def record(router: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
        weight, hidden = router.weight, inputs[0].detach()
        assert isinstance(weight, Tensor), "a router has one weight, [E, H]"
        logits = F.linear(hidden.reshape(-1, hidden.shape[-1]).float(), weight.detach().float())
        if top_k == logits.shape[1]:
            margins.of_layer.append(torch.full_like(logits[:, 0], torch.inf))
            return
        best = logits.topk(top_k + 1).values
        margins.of_layer.append(best[:, -2] - best[:, -1])

    routers = [module for module in model.modules() if type(module).__name__.endswith("Router")]
    handles = [router.register_forward_pre_hook(record) for router in routers]
    try:
        yield margins
    finally:
        for handle in handles:
            handle.remove()
