"""What holds for every policy loss: the gradient bound behind any guard, and what guards and factors do to it."""

import math
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from megatron_rl.loss.config import LossConfig
from megatron_rl.loss.guard import NoiseTable
from megatron_rl.loss.policy import PolicyStats, policy_loss

SHARED = runpy.run_path(str(Path(__file__).parents[1] / "policy_losses.py"))
KINDS, GUARDS, GUARDED, config_of, tensor, loss_of, slope_of = (
    SHARED[name] for name in ("KINDS", "GUARDS", "GUARDED", "config_of", "tensor", "loss_of", "slope_of")
)

# One property for all of them: c holds the logit gradient, whatever stands in front of it.


@st.composite
def guarded_configs(draw: st.DrawFn, g_max: st.SearchStrategy[float]) -> LossConfig:
    """Any policy loss, with any guard it may have, coupled or decoupled with any guard."""
    kind = draw(st.sampled_from(KINDS))
    guard = draw(st.sampled_from(GUARDS if kind in GUARDED else GUARDS[:1]))
    proximal = draw(st.sampled_from([None, *({"guard": guard} for guard in GUARDS)]))
    return config_of(kind, g_max=draw(g_max), guard=guard, proximal=proximal)


LOGITS = st.lists(st.floats(-30, 30), min_size=2, max_size=6)
LOGP = st.floats(-25, 0)
ADVANTAGE = st.floats(-5, 5).map(lambda a: a if abs(a) > 1e-20 else 0.0)


def logit_gradient(
    config: LossConfig, logits: Tensor, engine_logp: list[float], proximal_logp: list[float], advantages: list[float]
) -> tuple[Tensor, PolicyStats]:
    """d (sum of l_pg) / d logits of two tokens of one document, each drawn from its own row of logits. [2, V]"""
    logits = logits.clone().requires_grad_()
    logp = logits.log_softmax(-1)[:, 0]
    engine, proximal, a = (
        torch.tensor(stream, dtype=logits.dtype) for stream in (engine_logp, proximal_logp, advantages)
    )
    loss, stats = loss_of(
        config, logp, engine, a, proximal_logp=proximal, sequence_ids=torch.zeros(2, dtype=torch.long)
    )
    return torch.autograd.grad(loss.sum(), logits)[0], stats


def rounding_of_not_p(logits: Tensor) -> Tensor:
    """Relative error of 1 - p where autograd forms it from a p that rounds to near 1. [2]"""
    not_p = logits.double().softmax(-1)[:, 1:].sum(-1)
    return (8 * torch.finfo(logits.dtype).eps / not_p).clamp(max=1.0)


PAIR = st.tuples(LOGP, LOGP).map(list)


@given(
    config=guarded_configs(st.floats(0.1, 50)),
    logits=LOGITS,
    engine=PAIR,
    proximal=PAIR,
    advantages=st.tuples(ADVANTAGE, ADVANTAGE).map(list),
)
def test_the_logit_gradient_is_bounded_for_every_policy_loss_behind_every_guard(
    config: LossConfig, logits: list[float], engine: list[float], proximal: list[float], advantages: list[float]
) -> None:
    """Largest entry = |A| min(w (1 - p), g_max) and the sum of sizes is twice it, per token."""
    exact = torch.tensor([logits, logits[::-1]], dtype=torch.float64)
    gradient, stats = logit_gradient(config, exact, engine, proximal, advantages)
    assert config.g_max is not None
    a, rounding = tensor(*advantages).abs(), 1e-9 + rounding_of_not_p(exact)
    not_p = exact.softmax(-1)[:, 1:].sum(-1)
    want = a * (stats.weight * not_p).clamp(max=config.g_max)
    largest, total = gradient.abs().amax(-1), gradient.abs().sum(-1)
    assert (largest <= a * config.g_max * (1 + rounding)).all()
    assert ((largest - want).abs() <= want * rounding + 1e-300).all()
    assert ((total - 2 * largest).abs() <= 2 * largest * rounding + 1e-300).all()
    assert (gradient[~stats.kept] == 0).all()
    assert (gradient[:, 0] * tensor(*advantages) <= 0).all(), "descent moves the token the way A points"


@given(config=guarded_configs(st.just(2.0)), logits=LOGITS, engine=PAIR, proximal=PAIR)
@example(config=config_of("none", g_max=2.0), logits=[0.0, -17.0], engine=[-18.0, -18.0], proximal=[-1.0, -1.0])
def test_the_bound_holds_in_float32(
    config: LossConfig, logits: list[float], engine: list[float], proximal: list[float]
) -> None:
    low = torch.tensor([logits, logits[::-1]], dtype=torch.float32)
    gradient, _ = logit_gradient(config, low, engine, proximal, [-1.0, 1.0])
    assert gradient.isfinite().all()
    assert (gradient.abs().amax(-1) <= 2.0 * (1 + 1e-5)).all()


@given(config=guarded_configs(st.floats(0.1, 50)), logits=LOGITS, engine=PAIR, proximal=PAIR)
def test_a_small_step_moves_a_token_by_at_most_half_the_bound(
    config: LossConfig, logits: list[float], engine: list[float], proximal: list[float]
) -> None:
    """First order: one SGD step of eta on the logits moves p by at most eta |A| g_max / 2."""
    exact = torch.tensor([logits, logits[::-1]], dtype=torch.float64)
    gradient, _ = logit_gradient(config, exact, engine, proximal, [1.5, -1.5])
    p = exact.softmax(-1)
    first_order = p[:, 0] * (gradient[:, 0] - (p * gradient).sum(-1))  # row of the softmax Jacobian, eta = 1
    assert config.g_max is not None
    assert (first_order.abs() <= 1.5 * config.g_max / 2 + 1e-12).all()
    eta = 1e-4 / config.g_max
    moved = (exact - eta * gradient).softmax(-1)[:, 0] - p[:, 0]
    assert (moved.abs() <= eta * 1.5 * config.g_max / 2 + 30 * (eta * 1.5 * config.g_max) ** 2).all()


# Guards and the decoupled form.

RATIOS = tensor(0.2, 0.6, 1.0, 1.3, 1.7, 6.0)
WEIGHT_BEHIND = {
    "off": [0.2, 0.6, 1.0, 1.3, 1.7, 6.0],
    "tis": [0.2, 0.6, 1.0, 1.3, 1.5, 1.5],
    "clip": [0.0, 0.6, 1.0, 1.3, 1.7, 0.0],
    "reject": [0.0, 0.6, 1.0, 1.3, 1.7, 0.0],
    "clamp": [0.5, 0.6, 1.0, 1.3, 1.7, 2.0],
    "shrink": [ratio**0.5 for ratio in (0.2, 0.6, 1.0, 1.3, 1.7, 6.0)],
    "derived": [math.exp(max(-0.3, min(0.4, math.log(ratio)))) for ratio in (0.2, 0.6, 1.0, 1.3, 1.7, 6.0)],
}
"""By guard, for RATIOS: what multiplies -A in the gradient on log p."""
VALUE_BEHIND = WEIGHT_BEHIND | {"clip": [0.5, 0.6, 1.0, 1.3, 1.7, 2.0]}
P = torch.full((6,), 0.1, dtype=torch.float64)


@pytest.mark.parametrize("guard", GUARDS, ids=[guard["kind"] for guard in GUARDS])
@pytest.mark.parametrize("kind", GUARDED)
def test_a_guard_takes_the_place_of_the_ratio(kind: str, guard: dict[str, Any]) -> None:
    """On the ratio that the policy loss sees, coupled and decoupled; p stays inside every trust region."""
    a = tensor(2.0, 2.0, 2.0, -1.0, -1.0, -1.0)
    for proximal in (None, {}):
        config = config_of(kind, guard=guard, proximal=proximal)
        engine = (P / RATIOS).log()
        values, slopes = slope_of(config, P.log(), engine, a, proximal_logp=engine)
        torch.testing.assert_close(values, -a * tensor(*VALUE_BEHIND[guard["kind"]]))
        torch.testing.assert_close(slopes, -a * tensor(*WEIGHT_BEHIND[guard["kind"]]))
        _, stats = loss_of(config, P.log(), engine, a, proximal_logp=engine)
        same = torch.isclose(tensor(*VALUE_BEHIND[guard["kind"]]), RATIOS) & (stats.weight > 0)
        assert stats.guarded.tolist() == (~same).tolist()


@pytest.mark.parametrize("guard", GUARDS, ids=[guard["kind"] for guard in GUARDS])
@pytest.mark.parametrize("kind", KINDS)
def test_the_guarded_engine_ratio_is_a_constant_factor(kind: str, guard: dict[str, Any]) -> None:
    """The policy loss sees policy / proximal, here 1.1; what proximal / engine weighs multiplies it."""
    a = tensor(2.0, 2.0, 2.0, -1.0, -1.0, -1.0)
    proximal, engine = (P / 1.1).log(), (P / 1.1 / RATIOS).log()
    alone = slope_of(config_of(kind), P.log(), proximal, a)
    values, slopes = slope_of(
        config_of(kind, proximal={"guard": guard}), P.log(), engine, a, proximal_logp=proximal.requires_grad_()
    )
    torch.testing.assert_close(values, alone[0] * tensor(*VALUE_BEHIND[guard["kind"]]))
    torch.testing.assert_close(slopes, alone[1] * tensor(*WEIGHT_BEHIND[guard["kind"]]))


@given(
    kind=st.sampled_from(KINDS),
    policy=st.lists(LOGP, min_size=4, max_size=4),
    engine=st.lists(LOGP, min_size=4, max_size=4),
    g_max=st.none() | st.floats(0.1, 10),
)
def test_decoupled_is_coupled_where_proximal_is_the_engine(
    kind: str, policy: list[float], engine: list[float], g_max: float | None
) -> None:
    a, ids = tensor(1.0, -1.0, 0.0, 2.0), torch.tensor([0, 0, 1, 1])
    streams = (tensor(*policy), tensor(*engine), a)
    coupled = slope_of(config_of(kind, g_max=g_max), *streams, sequence_ids=ids)
    decoupled = slope_of(
        config_of(kind, g_max=g_max, proximal={}), *streams, sequence_ids=ids, proximal_logp=tensor(*engine)
    )
    torch.testing.assert_close(decoupled, coupled)


@given(policy=LOGP, proximal=LOGP, engine=LOGP)
def test_plain_importance_sampling_does_not_depend_on_how_the_ratio_is_factored(
    policy: float, proximal: float, engine: float
) -> None:
    if max(abs(policy - engine), abs(policy - proximal), abs(proximal - engine)) > 20:
        return  # each factor is clamped on its own
    streams = (tensor(policy), tensor(engine), tensor(1.0))
    folded = slope_of(config_of("none", g_max=2.0), *streams)
    factored = slope_of(config_of("none", g_max=2.0, proximal={}), *streams, proximal_logp=tensor(proximal))
    torch.testing.assert_close(factored, folded)


def test_the_decoupled_trust_region_holds_movement_and_not_engine_noise() -> None:
    """The engine is far from the policy on both tokens; only the second one moved since the last update."""
    policy, engine, proximal = tensor(0.6, 0.6).log(), tensor(0.3, 0.3).log(), tensor(0.55, 0.3).log()
    for kind in ("btv", "dppo_kl", "ppo_clip"):
        _, stats = loss_of(config_of(kind, proximal={}), policy, engine, tensor(1.0, 1.0), proximal_logp=proximal)
        assert stats.kept.tolist() == [True, False]
        _, coupled = loss_of(config_of(kind), policy, engine, tensor(1.0, 1.0))
        assert coupled.kept.tolist() == [False, False]


def test_the_engine_s_factor_is_clamped_where_exp_would_overflow() -> None:
    policy = torch.tensor([-0.7])
    _, stats = loss_of(
        config_of("none", proximal={}), policy, torch.tensor([-150.0]), torch.tensor([1.0]), proximal_logp=policy
    )
    assert float(stats.weight) == pytest.approx(math.exp(20), rel=1e-5)


@pytest.mark.parametrize(("guarded", "read"), [("guard", "policy"), ("proximal", "proximal")])
def test_a_guard_looks_up_the_bin_of_its_own_numerator(guarded: str, read: str) -> None:
    """Policy, proximal policy and engine put the token into three bins, whose lambdas differ."""
    table = NoiseTable(shrink=(0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7), lower=(-1.0,) * 7, upper=(1.0,) * 7)
    p, proximal, mu = 0.6, 0.4, 0.2
    lam = {"policy": table.shrink[3], "proximal": table.shrink[2]}[read]
    shrink: dict[str, Any] = {"kind": "shrink"}
    options = {"guard": shrink} if guarded == "guard" else {"proximal": {"guard": shrink}}
    _, stats = policy_loss(
        tensor(math.log(p)),
        tensor(math.log(mu)),
        tensor(1.0),
        config=config_of("none", **options),
        proximal_logp=tensor(math.log(proximal)),
        noise=table,
    )
    expected = (p / mu) ** lam if guarded == "guard" else p / proximal * (proximal / mu) ** lam
    assert stats.weight.item() == pytest.approx(expected)
