"""How close routers came to choosing other experts: where a difference of one rounding can change a whole layer."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_rl.distributed.groups import ParallelGroups
from megatron_rl.model.forward import DeviceBatch, gather_tokens
from megatron_rl.model.policy import PolicyModel
from megatron_rl.model.router import choice_scores, group_scores


class RouterMargins:
    """Filled by the forward inside watch_routers."""

    def __init__(self) -> None:
        self.of_layer: list[Tensor] = []

    def smallest(self, batch: DeviceBatch, groups: ParallelGroups) -> Tensor:
        """Per token the smallest margin over all MoE layers, float32 [T]. Collective over the batch's ranks.

        The margin is the gap between the last chosen and the first rejected expert's score.
        """
        if self.of_layer:
            margins = gather_tokens(torch.stack(self.of_layer).amin(0), batch, groups)
        else:  # a pipeline stage of dense layers
            margins = torch.full((len(batch.input_ids),), torch.inf, device=batch.input_ids.device)
        if groups.pp_size > 1:
            dist.all_reduce(margins, dist.ReduceOp.MIN, group=groups.pp_group)
        return margins


@contextmanager
def watch_routers(model: PolicyModel) -> Iterator[RouterMargins]:
    """Records the margins of every router of model during one forward; costs one small product per layer.

    A router that takes every expert has no other choice: its margin is infinite.
    """
    margins = RouterMargins()

    def record(router: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
        weight, hidden = router.weight, inputs[0].detach()
        assert isinstance(weight, Tensor), "a router has one weight, [E, H]"
        logits = F.linear(hidden.reshape(-1, hidden.shape[-1]).float(), weight.detach().float())
        margins.of_layer.append(choice_margin(logits, model.config, getattr(router, "expert_bias", None)))

    routers = [module for module in model.modules() if type(module).__name__.endswith("Router")]
    handles = [router.register_forward_pre_hook(record) for router in routers]
    try:
        yield margins
    finally:
        for handle in handles:
            handle.remove()


def choice_margin(logits_NE: Tensor, config: TransformerConfig, expert_bias: Tensor | None) -> Tensor:
    """Gap between the last chosen and the first rejected expert, or group of experts where that is smaller. [N]

    In logits where the router compares logits, in sigmoids where it compares those.
    """
    scores_NE = logits_NE.sigmoid() if config.moe_router_score_function == "sigmoid" else logits_NE
    margin = _gap(choice_scores(scores_NE, config, expert_bias), config.moe_router_topk)
    groups = group_scores(scores_NE, config, expert_bias)
    return margin if groups is None else torch.minimum(margin, _gap(groups, config.moe_router_group_topk or 1))


def _gap(scores: Tensor, num_chosen: int) -> Tensor:
    if num_chosen == scores.shape[1]:
        return torch.full_like(scores[:, 0], torch.inf)
    best = scores.topk(num_chosen + 1).values
    return best[:, -2] - best[:, -1]
