"""How close a router came to another choice, on a module that looks like a model."""

import math
from types import SimpleNamespace
from typing import Any

import torch

from megatron_rl.model.router_margin import watch_routers


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
    model.config = SimpleNamespace(moe_router_topk=top_k)
    with watch_routers(model) as routers:
        model(torch.tensor(tokens))
    model(torch.tensor(tokens))
    (of_layer,) = routers.of_layer
    return of_layer.tolist()


def test_margin_is_the_gap_between_the_last_chosen_and_the_first_rejected_expert() -> None:
    assert margins([[4.0, 1.0, 3.0, 2.5], [0.0, 0.0, 0.0, 8.0]], top_k=2) == [0.5, 0.0]


def test_a_router_that_takes_every_expert_is_never_near_a_tie() -> None:
    assert margins([[4.0, 1.0], [2.0, 2.0]], top_k=2) == [math.inf, math.inf]
