"""The policy-gradient term: the worked vectors of its sources, and what it promises for any logits."""

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from megatron_rl.loss.config import LossConfig
from megatron_rl.loss.policy import btv_mask, gradient_scale, policy_loss
from megatron_rl.loss.regularise import squared_log_ratio

DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
CONFIG = LossConfig()


def logs(values: list[float], dtype: torch.dtype) -> Tensor:
    return torch.tensor(values, dtype=dtype).log()


def logit_gradient(logits: Tensor, token: int, engine_p: float, advantage: float, config: LossConfig) -> Tensor:
    """d l_pg / d logits by autograd through the whole softmax. [V]"""
    logits = logits.clone().requires_grad_()
    logp = logits.log_softmax(0)[token : token + 1]
    loss, _ = policy_loss(
        logp, logs([engine_p], logits.dtype), torch.tensor([advantage], dtype=logits.dtype), config=config
    )
    return torch.autograd.grad(loss.sum(), logits)[0]


@DTYPES
def test_btv_mask_gives_the_single_token_vectors(dtype: torch.dtype) -> None:
    engine, policy = logs([0.5, 0.5, 0.01], dtype), logs([0.75, 0.6, 0.3], dtype)
    assert btv_mask(policy, engine, torch.tensor([1.0, 1.0, -1.0])).tolist() == [False, True, True]


@DTYPES
@pytest.mark.parametrize(
    ("eps_low", "eps_high", "kept"),
    [(0.2, 0.2, [0, 1, 0, 1, 1, 1]), (0.2, 0.35, [1, 1, 0, 1, 1, 1]), (0.35, 0.2, [0, 1, 1, 1, 1, 1])],
)
def test_btv_mask_gives_the_six_token_vectors(
    eps_low: float, eps_high: float, kept: list[int], dtype: torch.dtype
) -> None:
    policy, engine = logs([0.8, 0.6, 0.2, 0.4, 0.2, 0.8], dtype), logs([0.5] * 6, dtype)
    advantages = torch.tensor([1.0, 1, -1, -1, 1, -1], dtype=dtype)
    assert btv_mask(policy, engine, advantages, eps_low=eps_low, eps_high=eps_high).tolist() == kept


def test_zero_advantage_takes_the_lower_bound() -> None:
    policy, engine = logs([0.9, 0.1], torch.float64), logs([0.5, 0.5], torch.float64)
    assert btv_mask(policy, engine, torch.zeros(2)).tolist() == [True, False]


def test_symmetric_mask_needs_both_bounds_whatever_the_advantage() -> None:
    policy, engine = logs([0.8, 0.55, 0.2, 0.8, 0.55, 0.2], torch.float64), logs([0.5] * 6, torch.float64)
    advantages = torch.tensor([1.0, 1, 1, -1, -1, -1])
    assert btv_mask(policy, engine, advantages, sided="symmetric").tolist() == [False, True, False] * 2


@DTYPES
def test_worked_token(dtype: torch.dtype) -> None:
    """p_mu = .01, p_theta = .3, A = -.70625, vocabulary (.3, .5, .2)."""
    logits, advantage = logs([0.3, 0.5, 0.2], dtype), -0.70625
    policy, engine = logits[:1], logs([0.01], dtype)
    torch.testing.assert_close((policy - engine).exp(), torch.tensor([30.0], dtype=dtype))
    torch.testing.assert_close(gradient_scale(policy, engine), torch.tensor([2 / 21], dtype=dtype))
    loss, stats = policy_loss(policy, engine, torch.tensor([advantage], dtype=dtype), config=CONFIG)
    torch.testing.assert_close(loss, torch.tensor([2 / 21 * 0.70625 * 30], dtype=dtype))
    assert stats.kept.tolist() == [True]
    unscaled = logit_gradient(logits, 0, 0.01, advantage, LossConfig(g_max=None))
    torch.testing.assert_close(unscaled, torch.tensor([14.83125, -10.59375, -4.2375], dtype=dtype))
    torch.testing.assert_close(unscaled.abs().sum(), torch.tensor(29.6625, dtype=dtype))
    scaled = logit_gradient(logits, 0, 0.01, advantage, CONFIG)
    torch.testing.assert_close(scaled.abs().max(), torch.tensor(1.4125, dtype=dtype))
    torch.testing.assert_close(scaled, unscaled * 2 / 21)


LOGITS = st.lists(st.floats(-30, 30), min_size=2, max_size=12)
ENGINE_P = st.floats(-12, 0).map(lambda exponent: 10.0**exponent)
ADVANTAGE = st.floats(-5, 5).map(lambda a: a if abs(a) > 1e-20 else 0.0)
"""Without numbers whose products float32 rounds to subnormal ones."""


def rounding_of_not_p(logits: Tensor) -> float:
    """Relative error of 1 - p_theta where autograd forms it from a p that rounds to near 1."""
    not_p = float(logits.double().softmax(0)[1:].sum())
    return min(1.0, 8 * torch.finfo(logits.dtype).eps / not_p)


@given(logits=LOGITS, engine_p=ENGINE_P, advantage=ADVANTAGE, g_max=st.floats(0.1, 50))
def test_logit_gradient_is_the_advantage_times_the_bounded_g(
    logits: list[float], engine_p: float, advantage: float, g_max: float
) -> None:
    """Largest entry = |A| min(G, g_max) where the mask keeps the token, else 0; sum of entries' sizes twice that."""
    exact = torch.tensor(logits, dtype=torch.float64)
    logp = exact.log_softmax(0)[:1]
    p = float(logp.exp())
    not_p = float(exact.softmax(0)[1:].sum())
    # The log-ratio is clamped to +-20.
    g = min(max(p / engine_p, math.exp(-20)), math.exp(20)) * not_p
    gradient = logit_gradient(exact, 0, engine_p, advantage, LossConfig(g_max=g_max))
    kept = p - engine_p <= 0.2 if advantage > 0 else p - engine_p >= -0.2
    want = abs(advantage) * min(g, g_max) if kept else 0.0
    rounding = 1e-9 + rounding_of_not_p(exact)
    assert float(gradient.abs().max()) == pytest.approx(want, rel=rounding, abs=1e-300)
    assert float(gradient.abs().sum()) == pytest.approx(2 * want, rel=rounding, abs=1e-300)
    assert float(gradient.abs().max()) <= abs(advantage) * g_max * (1 + rounding)


@given(logits=LOGITS, engine_p=ENGINE_P, advantage=ADVANTAGE)
@example(logits=[0.0, -17.0], engine_p=1e-8, advantage=-1.0)
def test_logit_gradient_is_bounded_in_float32(logits: list[float], engine_p: float, advantage: float) -> None:
    low = torch.tensor(logits, dtype=torch.float32)
    gradient = logit_gradient(low, 0, engine_p, advantage, CONFIG)
    assert gradient.isfinite().all()
    assert float(gradient.abs().max()) <= abs(advantage) * 2.0 * (1 + 1e-5)


@given(logits=LOGITS, engine_p=ENGINE_P, advantage=ADVANTAGE)
def test_a_small_step_moves_the_token_by_at_most_a_quarter_of_twice_the_bound(
    logits: list[float], engine_p: float, advantage: float
) -> None:
    """First order: one SGD step of eta on the logits moves p by at most eta |A| g_max / 2."""
    exact = torch.tensor(logits, dtype=torch.float64)
    gradient = logit_gradient(exact, 0, engine_p, advantage, CONFIG)
    p = exact.softmax(0)
    first_order = float(p[0] * (gradient[0] - p @ gradient))  # softmax Jacobian row times the step, eta = 1
    assert abs(first_order) <= abs(advantage) * 2.0 / 2 + 1e-12
    eta = 1e-4
    moved = float((exact - eta * gradient).softmax(0)[0] - p[0])
    assert abs(moved + eta * first_order) <= 30 * eta**2 * (abs(advantage) * 2.0) ** 2 + 1e-12


@given(logits=LOGITS, engine_p=ENGINE_P, advantage=ADVANTAGE)
def test_descent_moves_the_token_the_way_its_advantage_points(
    logits: list[float], engine_p: float, advantage: float
) -> None:
    gradient = logit_gradient(torch.tensor(logits, dtype=torch.float64), 0, engine_p, advantage, CONFIG)
    assert float(gradient[0]) * advantage <= 0


def test_on_policy_nothing_is_masked_or_scaled_and_the_slope_is_the_advantage() -> None:
    logp = torch.tensor([-3.0, -0.01, -12.0], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([0.3, -0.7, 0.0], dtype=torch.float64)
    loss, stats = policy_loss(logp, logp.detach(), advantages, config=CONFIG)
    loss.sum().backward()
    assert stats.kept.all() and (stats.gradient_scale == 1).all()
    torch.testing.assert_close(logp.grad, -advantages)


def test_the_scale_is_a_constant_not_a_path_for_gradients() -> None:
    logp = logs([0.3], torch.float64).requires_grad_()
    assert not gradient_scale(logp, logs([0.01], torch.float64)).requires_grad
    loss, stats = policy_loss(logp, logs([0.01], torch.float64), torch.tensor([-1.0]).double(), config=CONFIG)
    loss.sum().backward()
    torch.testing.assert_close(logp.grad, loss.detach())
    assert not stats.gradient_scale.requires_grad


@pytest.mark.parametrize("policy_logp", [0.0, -0.0, -1e-9, 1e-7])
def test_a_certain_token_is_not_scaled(policy_logp: float) -> None:
    """1 - p rounds to 0, or to just below: c is 1, not an infinity of either sign."""
    assert gradient_scale(torch.tensor([policy_logp]), torch.tensor([-1.0])).tolist() == [1.0]


@DTYPES
def test_the_bound_holds_where_one_minus_p_is_mostly_rounding(dtype: torch.dtype) -> None:
    """Log-probs with all their digits, as a head gives them, of a p that has few of 1 - p."""
    logp = (-torch.linspace(0, 60, 2000, dtype=dtype) * torch.finfo(dtype).eps).requires_grad_()
    loss, _ = policy_loss(logp, torch.full_like(logp, -100.0), -torch.ones_like(logp), config=LossConfig(g_max=1e-9))
    (slope,) = torch.autograd.grad(loss.sum(), logp)
    assert float((slope * (1 - logp.detach().exp())).max()) == pytest.approx(1e-9, rel=0.1)
    assert float((slope * (1 - logp.detach().exp())).max()) <= 1e-9 * (1 + 1e-5)


def test_the_scale_keeps_the_digits_of_a_small_rest_and_is_one_on_policy_up_to_the_tightest_bound() -> None:
    logp, engine = torch.tensor([-1e-6]), torch.tensor([-16.0])
    want = 2.0 / (math.exp(16) * (1e-6 + torch.finfo(torch.float32).eps))
    assert float(gradient_scale(logp, engine)) == pytest.approx(want, rel=1e-4)
    undecided = torch.tensor([-60.0, -1.0, -1e-6])
    assert gradient_scale(undecided, undecided, g_max=1.0).tolist() == [1.0, 1.0, 1.0]


def test_an_infinite_advantage_moves_no_closed_token() -> None:
    logp = logs([0.9], torch.float64).requires_grad_()
    loss, _ = policy_loss(logp, logs([0.1], torch.float64), torch.tensor([math.inf]).double(), config=CONFIG)
    assert torch.autograd.grad(loss.sum(), logp)[0].tolist() == [0.0]


def test_a_ratio_beyond_exp_stays_finite_and_still_pushes() -> None:
    logp = torch.tensor([-0.7, -200.0], requires_grad=True)
    engine = torch.tensor([-150.0, -0.7])
    loss, _ = policy_loss(logp, engine, torch.tensor([-1.0, 1.0]), config=CONFIG)
    loss.sum().backward()
    assert loss.isfinite().all() and logp.grad is not None and logp.grad.isfinite().all()
    p = math.exp(-0.7)
    assert float(logp.grad[0]) * (1 - p) == pytest.approx(2.0, rel=1e-5)
    unbounded, _ = policy_loss(logp.detach(), engine, torch.tensor([-1.0, 1.0]), config=LossConfig(g_max=None))
    assert float(unbounded[0]) == pytest.approx(math.exp(20), rel=1e-5)


@pytest.mark.parametrize("missing", [math.nan, -math.inf])
def test_a_missing_engine_log_prob_gives_nothing_and_no_nan(missing: float) -> None:
    logp = torch.tensor([-1.0, -2.0], requires_grad=True)
    engine = torch.tensor([-1.1, missing])
    loss, stats = policy_loss(logp, engine, torch.ones(2), config=CONFIG)
    (loss + squared_log_ratio(logp, engine)).sum().backward()
    assert loss[1] == 0 and stats.kept.tolist() == [True, False] and stats.gradient_scale[1] == 1
    assert logp.grad is not None and logp.grad.isfinite().all() and logp.grad[1] == 0 and logp.grad[0] != 0


def test_squared_log_ratio_descends_towards_the_engine_from_either_side() -> None:
    logp = torch.tensor([-1.0, -3.0, -2.0], dtype=torch.float64, requires_grad=True)
    engine = torch.full((3,), -2.0, dtype=torch.float64)
    values = squared_log_ratio(logp, engine)
    values.sum().backward()
    torch.testing.assert_close(values.detach(), torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64))
    torch.testing.assert_close(logp.grad, torch.tensor([2.0, -2.0, 0.0], dtype=torch.float64))


def test_no_gradient_flows_into_what_the_engine_or_the_rewards_gave() -> None:
    streams = [torch.full((3,), value, requires_grad=True) for value in (-1.0, -1.2, 0.5)]
    loss, _ = policy_loss(*streams, config=CONFIG)
    (loss + squared_log_ratio(streams[0], streams[1])).sum().backward()
    assert [stream.grad is None for stream in streams] == [False, True, True]


ONE, TWO = torch.zeros(1), torch.zeros(2)


def test_bad_arguments_are_refused_with_their_value() -> None:
    with pytest.raises(ValueError, match=r"eps_low must not be negative, got -0\.1"):
        btv_mask(ONE, ONE, ONE, eps_low=-0.1)
    with pytest.raises(ValueError, match="eps_high must not be negative, got nan"):
        btv_mask(ONE, ONE, ONE, eps_high=math.nan)
    with pytest.raises(ValueError, match="sided must be sign or symmetric, got 'both'"):
        btv_mask(ONE, ONE, ONE, sided="both")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    for g_max in (0.0, -2.0, math.nan):
        with pytest.raises(ValueError, match=f"g_max must be above 0, got {g_max}"):
            gradient_scale(ONE, ONE, g_max=g_max)
    for call in (
        lambda: btv_mask(ONE, TWO, ONE),
        lambda: gradient_scale(ONE, TWO),
        lambda: policy_loss(ONE, ONE, TWO, config=CONFIG),
        lambda: squared_log_ratio(ONE, TWO),
    ):
        with pytest.raises(ValueError, match=r"aligned with policy_logp \[1\], got \[2\]"):
            call()
    with pytest.raises(ValueError, match=r"one stream \[T\], got \[1, 2\]"):
        gradient_scale(torch.zeros(1, 2), torch.zeros(1, 2))
