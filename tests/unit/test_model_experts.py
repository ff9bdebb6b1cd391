"""The mixture of experts against one that computes every expert for every token, in float64."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from megatron_rl.config import ConfigError
from megatron_rl.model.experts import ExpertLayer
from megatron_rl.model.layer import cpu_block_spec

HIDDEN, INNER, EXPERTS, TOP_K = 16, 24, 8, 3


def expert_layer(*, softmax_over_all: bool) -> ExpertLayer:
    """On one rank, with random weights; the last expert is never chosen."""
    config = SimpleNamespace(
        hidden_size=HIDDEN,
        moe_ffn_hidden_size=INNER,
        num_moe_experts=EXPERTS,
        moe_router_topk=TOP_K,
        moe_router_pre_softmax=softmax_over_all,
        params_dtype=torch.float32,
        sequence_parallel=False,
    )
    alone = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    layer = ExpertLayer(config, pg_collection=SimpleNamespace(ep=alone, expt_dp=alone))  # type: ignore[arg-type]
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0, 0.5)
        layer.router.weight[-1] = 0
        layer.router.weight[-1, 0] = -100
    return layer


def dense_experts(
    hidden_NH: torch.Tensor, router_EH: torch.Tensor, fc1: torch.Tensor, fc2: torch.Tensor, *, softmax_over_all: bool
) -> torch.Tensor:
    """Every expert on every token, weighted by a router whose unchosen weights are zero."""
    probabilities = (hidden_NH @ router_EH.T).softmax(-1)
    kept = torch.zeros_like(probabilities).scatter(1, probabilities.topk(TOP_K).indices, 1.0)
    weights = probabilities * kept
    if not softmax_over_all:
        weights = weights / weights.sum(-1, keepdim=True)
    out = torch.zeros_like(hidden_NH)
    for expert in range(EXPERTS):
        gate, up = (hidden_NH @ fc1[expert].T).chunk(2, dim=-1)
        out = out + weights[:, expert, None] * ((F.silu(gate) * up) @ fc2[expert].T)
    return out


@pytest.mark.parametrize("softmax_over_all", [True, False])
def test_values_and_gradients_are_as_good_as_an_honest_float32_reference(softmax_over_all: bool) -> None:
    layer = expert_layer(softmax_over_all=softmax_over_all)
    weights = (layer.router.weight, layer.experts.linear_fc1_weight, layer.experts.linear_fc2_weight)
    hidden = torch.randn(50, HIDDEN)
    hidden[:, 0] = 1.0
    upstream = torch.randn(50, HIDDEN)

    def dense(dtype: torch.dtype) -> list[torch.Tensor]:
        inputs = [x.detach().to(dtype).requires_grad_() for x in (hidden, *weights)]
        out = dense_experts(*inputs, softmax_over_all=softmax_over_all)
        return [out.detach(), *torch.autograd.grad((out * upstream.to(dtype)).sum(), inputs)]

    inputs = hidden.clone().requires_grad_()
    out, bias = layer(inputs.unsqueeze(1))
    assert bias is None
    got = [out.detach().squeeze(1), *torch.autograd.grad((out.squeeze(1) * upstream).sum(), (inputs, *weights))]
    for mine, plain, want in zip(got, dense(torch.float32), dense(torch.float64), strict=True):
        assert (mine - want).abs().max() <= 2 * (plain - want).abs().max()
    assert not got[3][-1].any(), "an expert that no token chose has gradient zero, not garbage"


def test_a_rank_whose_experts_get_no_token_has_gradient_zero() -> None:
    experts = expert_layer(softmax_over_all=False).experts
    rows = torch.empty(0, HIDDEN, requires_grad=True)
    out = experts(rows, torch.zeros(EXPERTS, dtype=torch.int64))
    out.backward(torch.empty(0, HIDDEN))
    assert out.shape == (0, HIDDEN)
    for weight in (experts.linear_fc1_weight, experts.linear_fc2_weight):
        assert weight.grad is not None and not weight.grad.any()


def test_sizes_that_the_grouped_product_refuses_are_named() -> None:
    config = SimpleNamespace(hidden_size=64, moe_ffn_hidden_size=50, params_dtype=torch.float32)
    with pytest.raises(ConfigError, match=r"moe_intermediate_size.*50"):
        cpu_block_spec(config)  # type: ignore[arg-type]
