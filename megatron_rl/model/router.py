"""Which experts a token takes and with which weights: the CPU's router, by the rules of Megatron's TopKRouter."""

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class Router(MegatronModule):
    """Scores tokens against experts and keeps the K best, in float32 whatever the model's dtype."""

    expert_bias: Tensor | None
    """float32 [E], added to the scores when experts are chosen; comes with the weights and is never trained."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        assert config.num_moe_experts is not None, "an MoE layer has experts"
        self.weight = torch.nn.Parameter(
            torch.empty(config.num_moe_experts, config.hidden_size, dtype=config.params_dtype)
        )
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        has_bias = config.moe_router_enable_expert_bias
        self.register_buffer("expert_bias", torch.empty(config.num_moe_experts) if has_bias else None)

    def forward(self, hidden_NH: Tensor) -> tuple[Tensor, Tensor]:
        """(expert numbers int64 [N, K], their weights float32 [N, K])."""
        return route(F.linear(hidden_NH.float(), self.weight.float()), self.config, self.expert_bias)


def route(logits_NE: Tensor, config: TransformerConfig, expert_bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(expert numbers int64 [N, K], their weights [N, K] in the logits' dtype).

    Weights are a softmax over all experts, a softmax over the chosen ones, or sigmoids divided by their sum, by
    config's moe_router_score_function and moe_router_pre_softmax; times moe_router_topk_scaling_factor.
    """
    top_k, by_sigmoid = config.moe_router_topk, config.moe_router_score_function == "sigmoid"
    if by_sigmoid:
        scores_NE = logits_NE.sigmoid()
    else:
        scores_NE = logits_NE.softmax(-1) if config.moe_router_pre_softmax else logits_NE
    experts_NK = choice_scores(scores_NE.detach(), config, expert_bias).topk(top_k).indices
    weights_NK = scores_NE.gather(1, experts_NK)
    if by_sigmoid and top_k > 1:
        weights_NK = weights_NK / (weights_NK.sum(-1, keepdim=True) + 1e-20)
    elif not by_sigmoid and not config.moe_router_pre_softmax:
        weights_NK = weights_NK.softmax(-1)
    if factor := config.moe_router_topk_scaling_factor:
        weights_NK = weights_NK * factor
    return experts_NK, weights_NK


def choice_scores(scores_NE: Tensor, config: TransformerConfig, expert_bias: Tensor | None = None) -> Tensor:
    """The scores whose K largest decide: with the bias, and minus infinity outside the best groups of experts. [N, E]

    A group counts by the sum of its K / moe_router_group_topk best experts. (DeepSeek-V3, arXiv 2412.19437)
    """
    of_group = group_scores(scores_NE, config, expert_bias)
    if expert_bias is not None:
        scores_NE = scores_NE + expert_bias
    if of_group is None:
        return scores_NE
    kept = of_group.topk(config.moe_router_group_topk or 1).indices
    dropped = torch.ones_like(of_group, dtype=torch.bool).scatter_(1, kept, False)
    return scores_NE.masked_fill(dropped.repeat_interleave(scores_NE.shape[1] // dropped.shape[1], 1), -torch.inf)


def group_scores(scores_NE: Tensor, config: TransformerConfig, expert_bias: Tensor | None = None) -> Tensor | None:
    """The score of each group of experts, [N, groups]; None where experts are not grouped."""
    num_groups, kept = config.moe_router_num_groups, config.moe_router_group_topk
    if not num_groups or not kept:
        return None
    if expert_bias is not None:
        scores_NE = scores_NE + expert_bias
    return scores_NE.unflatten(1, (num_groups, -1)).topk(config.moe_router_topk // kept).values.sum(-1)


def freeze_expert_bias(model: torch.nn.Module, config: TransformerConfig) -> None:
    """Stops Megatron from moving the expert bias after each step, which is its way to balance pre-training.

    To be called once model, Megatron's or ours, is built from config: from then on the routers keep their bias, and
    config says that there is none to count tokens for and to update.
    """
    for module in model.modules():
        if hasattr(module, "enable_expert_bias"):
            module.enable_expert_bias = False  # type: ignore[assignment]
    config.moe_router_enable_expert_bias = False
