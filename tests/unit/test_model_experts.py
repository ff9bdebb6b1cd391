"""The mixture of experts in float64: against one that computes every expert for every token, and transformers' own."""

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron_rl.model.experts import ExpertLayer, GroupedExperts
from megatron_rl.model.layer import cpu_block_spec
from megatron_rl.model.mlp import SwiGlu
from megatron_rl.model.router import route

hf_model = runpy.run_path(str(Path(__file__).parents[1] / "hf_models.py"))["hf_model"]

HIDDEN, INNER, EXPERTS, TOP_K = 16, 24, 8, 3
ALONE = SimpleNamespace(size=lambda: 1, rank=lambda: 0)


def config_of(**changes: Any) -> Any:
    settings = dict(
        hidden_size=HIDDEN,
        moe_ffn_hidden_size=INNER,
        moe_shared_expert_intermediate_size=None,
        num_moe_experts=EXPERTS,
        moe_router_topk=TOP_K,
        moe_router_pre_softmax=False,
        moe_router_score_function="softmax",
        moe_router_enable_expert_bias=False,
        moe_router_num_groups=None,
        moe_router_group_topk=None,
        moe_router_topk_scaling_factor=None,
        params_dtype=torch.float32,
        sequence_parallel=False,
    )
    return SimpleNamespace(**{**settings, **changes})


def groups_of(**changes: Any) -> Any:
    return SimpleNamespace(**{**dict(ep=ALONE, expt_tp=ALONE, expt_dp=ALONE, tp=ALONE), **changes})


def expert_layer(*, softmax_over_all: bool) -> ExpertLayer:
    """On one rank, with random weights; the last expert is never chosen."""
    layer = ExpertLayer(config_of(moe_router_pre_softmax=softmax_over_all), pg_collection=groups_of())
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
        gate, up = hidden_NH @ fc1[expert, 0].T, hidden_NH @ fc1[expert, 1].T
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


def glm_layer(mixture: Any) -> ExpertLayer:
    """Ours with the weights of transformers' Glm4MoeMoE, the shared expert apart: its linears need process groups."""
    settings = mixture.config
    config = config_of(
        hidden_size=settings.hidden_size,
        moe_ffn_hidden_size=settings.moe_intermediate_size,
        num_moe_experts=settings.n_routed_experts,
        moe_router_topk=settings.num_experts_per_tok,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_num_groups=settings.n_group,
        moe_router_group_topk=settings.topk_group,
        moe_router_topk_scaling_factor=settings.routed_scaling_factor,
    )
    layer = ExpertLayer(config, pg_collection=groups_of())
    state = {
        "router.weight": mixture.gate.weight,
        "router.expert_bias": mixture.gate.e_score_correction_bias,
        "experts.linear_fc1_weight": mixture.experts.gate_up_proj.unflatten(1, (2, -1)),
        "experts.linear_fc2_weight": mixture.experts.down_proj,
    }
    layer.load_state_dict({key: value.detach() for key, value in state.items()})
    layer.shared_experts = lambda hidden: (mixture.shared_experts(hidden), None)  # type: ignore[assignment]
    return layer


def test_a_glm_mixture_is_as_good_as_transformers_own() -> None:
    """Value and gradients, errors against transformers' code in float64, where its router would stay in float32."""
    model = hf_model("glm", 3)
    model.set_experts_implementation("eager")
    mixture = model.model.layers[1].mlp
    layer = glm_layer(mixture)
    hidden, upstream = torch.randn(60, HIDDEN * 4), torch.randn(60, HIDDEN * 4)

    def answers(module: Any, weights: list[torch.Tensor], dtype: torch.dtype, batch_axis: int) -> list[torch.Tensor]:
        inputs = hidden.to(dtype).requires_grad_()
        out = module(inputs.unsqueeze(batch_axis))
        out = (out[0] if isinstance(out, tuple) else out).reshape(hidden.shape)
        return [out.detach(), *torch.autograd.grad((out * upstream.to(dtype)).sum(), [inputs, *weights])]

    def weights_of(module: Any) -> list[torch.Tensor]:
        return [module.gate.weight, module.experts.gate_up_proj, module.experts.down_proj]

    def exact_gate(states: torch.Tensor) -> tuple[None, torch.Tensor, torch.Tensor]:
        logits = states.flatten(0, -2) @ mixture.gate.weight.T
        experts, weights = route(logits, layer.config, mixture.gate.e_score_correction_bias)
        return None, weights, experts

    ours: list[torch.Tensor] = [layer.router.weight, *layer.experts.parameters()]
    got = answers(layer, ours, torch.float32, 1)
    got[3] = got[3].flatten(1, 2)
    plain = answers(mixture, weights_of(mixture), torch.float32, 0)
    mixture.double().gate.forward = exact_gate
    exact = answers(mixture, weights_of(mixture), torch.float64, 0)
    for mine, honest, want in zip(got, plain, exact, strict=True):
        assert (mine - want).abs().max() <= 2 * (honest - want).abs().max()


def test_swiglu_is_as_good_as_torchs() -> None:
    gate_up, upstream = torch.randn(30, 2 * INNER), torch.randn(30, INNER)

    def answers(function: Any, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = gate_up.to(dtype).requires_grad_()
        out = function(inputs)
        return out.detach(), torch.autograd.grad((out * upstream.to(dtype)).sum(), inputs)[0]

    def plain(x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up

    results = answers(SwiGlu.apply, torch.float32), answers(plain, torch.float32), answers(plain, torch.float64)
    for mine, honest, want in zip(*results, strict=True):
        assert (mine - want).abs().max() <= 2 * (honest - want).abs().max()


def test_a_rank_whose_experts_get_no_token_has_gradient_zero() -> None:
    experts = expert_layer(softmax_over_all=False).experts
    rows = torch.empty(0, HIDDEN, requires_grad=True)
    out = experts(rows, torch.zeros(EXPERTS, dtype=torch.int64))
    out.backward(torch.empty(0, HIDDEN))
    assert out.shape == (0, HIDDEN)
    for weight in (experts.linear_fc1_weight, experts.linear_fc2_weight):
        assert weight.grad is not None and not weight.grad.any()


@pytest.mark.parametrize("layer_axis", [(), ((0, 5, 7),)], ids=["layers by name", "layers as an axis"])
def test_pieces_of_all_expert_ranks_tile_the_whole_stacks(layer_axis: tuple) -> None:
    """Every element of the checkpoint's tensors lies in exactly one rank's piece; data-parallel copies are replicas."""
    ways = {"ep": 4, "expt_tp": 3, "expt_dp": 2}
    covered: dict[str, torch.Tensor] = {}
    for ep in range(4):
        for etp in range(3):
            ranks = {"ep": ep, "expt_tp": etp, "expt_dp": 1}
            places = {
                name: SimpleNamespace(size=lambda name=name: ways[name], rank=lambda rank=rank: rank)
                for name, rank in ranks.items()
            }
            experts = GroupedExperts(config_of(), groups_of(**places))
            assert experts.linear_fc1_weight.shape == (2, 2, INNER // 3, HIDDEN)
            assert experts.linear_fc2_weight.shape == (2, HIDDEN, INNER // 3)
            for key, piece in experts.sharded_state_dict("experts.", layer_axis).items():
                whole = covered.setdefault(key, torch.zeros(piece.global_shape, dtype=torch.int64))
                sizes = (1,) * piece.prepend_axis_num + tuple(piece.local_shape)
                span = tuple(slice(o, o + n) for o, n in zip(piece.global_offset, sizes, strict=True))
                whole[span] += 1
                assert piece.replica_id == (0, 0, 1)
    layers = (7,) if layer_axis else ()
    assert {key: tuple(whole.shape) for key, whole in covered.items()} == {
        "experts.linear_fc1_weight": (*layers, EXPERTS, 2, INNER, HIDDEN),
        "experts.linear_fc2_weight": (*layers, EXPERTS, HIDDEN, INNER),
    }
    for whole in covered.values():
        assert (whole[5] if layer_axis else whole).eq(1).all()
        assert whole.sum() == (whole[5] if layer_axis else whole).numel()


@pytest.mark.parametrize("frequency", [2, [1, 0, 1, 0, 1]])
def test_a_stage_gets_the_kinds_of_its_own_layers(frequency: int | list[int]) -> None:
    config = config_of(moe_layer_freq=frequency, qk_layernorm=True, expert_tensor_parallel_size=1)
    spec = cpu_block_spec(config, range(1, 4))
    assert spec.layer_specs is not None
    assert [layer.params["has_experts"] for layer in spec.layer_specs] == [False, True, False]
