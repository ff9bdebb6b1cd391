"""How close a router came to another choice, on a module that looks like a model."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_rl.model.router_margin import choice_margin, watch_routers


class ToyRouter(torch.nn.Module):
    """Router logits of a token are the token itself."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.eye(num_experts))

    def forward(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        return hidden_NH


def margins(tokens: list[list[float]], top_k: int) -> list[float]:
    """Margin of each token under one router."""
    model: Any = torch.nn.Sequential(ToyRouter(len(tokens[0])))
    model.config = SimpleNamespace(
        moe_router_topk=top_k,
        moe_router_score_function="softmax",
        moe_router_num_groups=None,
        moe_router_group_topk=None,
    )
    with watch_routers(model) as routers:
        model(torch.tensor(tokens))
    model(torch.tensor(tokens))
    (of_layer,) = routers.of_layer
    return of_layer.tolist()


def test_margin_is_the_gap_between_the_last_chosen_and_the_first_rejected_expert() -> None:
    assert margins([[4.0, 1.0, 3.0, 2.5], [0.0, 0.0, 0.0, 8.0]], top_k=2) == [0.5, 0.0]


def test_a_router_that_takes_every_expert_is_never_near_a_tie() -> None:
    assert margins([[4.0, 1.0], [2.0, 2.0]], top_k=2) == [math.inf, math.inf]


def test_grouped_sigmoid_routers_can_also_tie_between_groups() -> None:
    """Two groups of two, one kept by the sum of its two best: bias and sigmoid count."""
    config: Any = SimpleNamespace(
        moe_router_topk=2, moe_router_score_function="sigmoid", moe_router_num_groups=2, moe_router_group_topk=1
    )
    scores = torch.tensor([[0.9, 0.1, 0.5, 0.45]])
    bias = torch.tensor([0.0, 0.0, 0.0, 0.04])
    margin = choice_margin(scores.logit(), config, bias)
    assert margin.tolist() == [pytest.approx(0.01, abs=1e-6)], "groups 1.0 and .99; inside a group both are taken"
