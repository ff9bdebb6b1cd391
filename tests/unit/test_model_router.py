"""The router against plain loops in float64, against transformers' and against Megatron's own."""

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

from megatron_rl.model.families import family_for
from megatron_rl.model.router import Router, choice_scores, freeze_expert_bias, route

hf_model = runpy.run_path(str(Path(__file__).parents[1] / "hf_models.py"))["hf_model"]

VARIANTS: dict[str, dict[str, Any]] = {
    "softmax over all": dict(moe_router_pre_softmax=True),
    "softmax over the chosen": {},
    "scaled softmax": dict(moe_router_topk_scaling_factor=2.5),
    "sigmoid": dict(moe_router_score_function="sigmoid"),
    "sigmoid of one": dict(moe_router_score_function="sigmoid", moe_router_topk=1),
    "sigmoid with bias, scaled": dict(
        moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True, moe_router_topk_scaling_factor=2.5
    ),
    "sigmoid with bias and groups": dict(
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_topk=4,
        moe_router_num_groups=4,
        moe_router_group_topk=2,
    ),
}
GROUPS = "sigmoid with bias and groups"


def router_config(**changes: Any) -> Any:
    settings = dict(
        hidden_size=16,
        num_moe_experts=12,
        moe_router_topk=3,
        moe_router_pre_softmax=False,
        moe_router_score_function="softmax",
        moe_router_num_groups=None,
        moe_router_group_topk=None,
        moe_router_topk_scaling_factor=None,
        moe_router_enable_expert_bias=False,
        params_dtype=torch.float32,
        sequence_parallel=False,
    )
    return SimpleNamespace(**{**settings, **changes})


@pytest.mark.parametrize("variant", VARIANTS)
def test_choices_and_weights_are_those_of_megatrons_router(variant: str) -> None:
    """So a model routes alike on the CPU and under Transformer Engine."""
    config = router_config(**VARIANTS[variant])
    torch.manual_seed(0)
    logits = torch.randn(200, 12)
    bias = torch.randn(12) * 0.3 if config.moe_router_enable_expert_bias else None
    experts, weights = route(logits, config, bias)
    probs, chosen = topk_routing_with_score_function(
        logits,
        config.moe_router_topk,
        use_pre_softmax=config.moe_router_pre_softmax,
        num_groups=config.moe_router_num_groups,
        group_topk=config.moe_router_group_topk,
        scaling_factor=config.moe_router_topk_scaling_factor,
        score_function=config.moe_router_score_function,
        expert_bias=bias,
    )
    assert torch.equal(torch.zeros_like(chosen).scatter(1, experts, True), chosen)
    assert torch.equal(torch.zeros_like(probs).scatter(1, experts, weights), probs)


def plain_route(logits: list[float], bias: list[float], groups: int, kept: int, top_k: int, factor: float) -> Any:
    """{expert: weight} of one token by the sigmoid router's definition, one number at a time."""
    scores = [1 / (1 + torch.tensor(-x, dtype=torch.float64).exp().item()) for x in logits]
    biased = [s + b for s, b in zip(scores, bias, strict=True)]
    size = len(logits) // groups
    worth = {g: sum(sorted(biased[g * size : (g + 1) * size])[-(top_k // kept) :]) for g in range(groups)}
    allowed = sorted(worth, key=lambda g: -worth[g])[:kept]
    best = sorted((e for e in range(len(logits)) if e // size in allowed), key=lambda e: -biased[e])[:top_k]
    return {e: factor * scores[e] / sum(scores[x] for x in best) for e in best}


def test_groups_bias_and_scaling_follow_the_definition() -> None:
    config = router_config(**VARIANTS[GROUPS], moe_router_topk_scaling_factor=1.5)
    torch.manual_seed(1)
    logits, bias = torch.randn(50, 12, dtype=torch.float64), torch.randn(12, dtype=torch.float64) * 0.5
    experts, weights = route(logits, config, bias)
    for token in range(50):
        want = plain_route(logits[token].tolist(), bias.tolist(), groups=4, kept=2, top_k=4, factor=1.5)
        got = dict(zip(experts[token].tolist(), weights[token].tolist(), strict=True))
        assert got == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize("name", ["glm", "glm_air"])
def test_a_glm_router_chooses_what_transformers_chooses(name: str) -> None:
    """The same experts, in any order; their weights to 1e-6."""
    model = hf_model(name, 0)
    gate = model.model.layers[1].mlp.gate
    config = router_config(**{k: v for k, v in glm_kwargs(model).items() if "router" in k or k == "num_moe_experts"})
    config.hidden_size = 64
    router = Router(config)
    assert router.expert_bias is not None
    router.load_state_dict({"weight": gate.weight, "expert_bias": gate.e_score_correction_bias})
    hidden = torch.randn(100, 64)
    _, hf_weights, hf_experts = gate(hidden)
    experts, weights = router(hidden)
    order, hf_order = experts.argsort(1), hf_experts.argsort(1)
    assert torch.equal(experts.gather(1, order), hf_experts.gather(1, hf_order))
    assert torch.allclose(weights.gather(1, order), hf_weights.gather(1, hf_order), rtol=1e-6)
    unbiased = gate.weight.matmul(hidden.T).T.topk(2).indices.sort(1).values
    assert not torch.equal(unbiased, experts.gather(1, order)), "the bias changes choices in this test"


def glm_kwargs(model: Any) -> dict[str, Any]:
    hf_config = {**model.config.to_dict(), "architectures": ["Glm4MoeForCausalLM"]}
    return family_for(hf_config).transformer_kwargs(hf_config)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_router_computes_in_float32_whatever_the_models_dtype(variant: str) -> None:
    torch.manual_seed(2)
    router = Router(router_config(**VARIANTS[variant], params_dtype=torch.bfloat16))
    torch.nn.init.normal_(router.weight)
    if router.expert_bias is not None:
        router.expert_bias.normal_()
    hidden = torch.randn(40, 16).bfloat16()
    experts, weights = router(hidden)
    want_experts, want_weights = route(hidden.float() @ router.weight.float().T, router.config, router.expert_bias)
    assert weights.dtype == torch.float32 and experts.dtype == torch.int64
    assert torch.equal(experts, want_experts) and torch.equal(weights, want_weights)


def test_choice_scores_leave_only_the_best_groups() -> None:
    config = router_config(**VARIANTS[GROUPS])
    scores = torch.tensor([[5.0, 0, 0, 3, 3, 0, 4, 0, 0, 0, 0, 1]])
    left = choice_scores(scores, config).isfinite().view(4, 3).all(1)
    assert left.tolist() == [True, True, False, False], "sums of the two best are 5, 6, 4 and 1"


def test_a_frozen_expert_bias_is_used_but_neither_counted_for_nor_updated() -> None:
    config = router_config(**VARIANTS[GROUPS])
    model = torch.nn.ModuleList([Router(config), torch.nn.Module()])
    megatrons = model[1]
    megatrons.enable_expert_bias = True  # type: ignore[assignment]
    freeze_expert_bias(model, config)
    assert not config.moe_router_enable_expert_bias, "Megatron's finalize_model_grads updates where config says so"
    assert not megatrons.enable_expert_bias, "Megatron's TopKRouter counts tokens where it says so itself"
    assert model[0].expert_bias is not None
