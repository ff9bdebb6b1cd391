"""The scalar the trainer descends: which tokens count, by what they are divided, what is measured."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_rl.loss.config import LossConfig
from megatron_rl.loss.head import LossStats, RlStreams, rl_loss, sft_loss
from megatron_rl.loss.reduce import trained_mask
from megatron_rl.telemetry.values import Max, Mean, Sum, merge_metrics

CONFIG = LossConfig()
NAN = math.nan


def rl(
    policy: list[float] | Tensor,
    engine: list[float],
    advantages: list[float],
    mask: list[bool] | None = None,
    *,
    config: LossConfig = CONFIG,
    denominator: float = 1.0,
    **streams: Tensor | None,
) -> tuple[Tensor, LossStats]:
    """rl_loss of one microbatch whose streams have the dtype of policy; the mask is all True if None."""
    policy = policy if isinstance(policy, Tensor) else torch.tensor(policy)
    mask = [True] * len(engine) if mask is None else mask
    batch = RlStreams(
        policy_logp=policy,
        engine_logp=torch.tensor(engine, dtype=policy.dtype),
        advantages=torch.tensor(advantages, dtype=policy.dtype),
        loss_mask=torch.tensor(mask, dtype=torch.bool),
        **streams,
    )
    return rl_loss(batch, config=config, denominator=denominator)


def results(stats: LossStats) -> dict[str, float]:
    return {name: value.result() for name, value in stats.metrics.items()}


def logs(values: list[float]) -> list[float]:
    return [math.log(value) for value in values]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_loss_is_the_formula_summed_over_trained_tokens(dtype: torch.dtype) -> None:
    """Written out by hand for a kept, a masked, a scaled and an untrained token."""
    policy, engine = [0.6, 0.75, 0.3, 0.9], [0.5, 0.5, 0.01, 0.1]
    advantages, mask = [1.0, 2.0, -0.70625, 5.0], [True, True, True, False]
    loss, stats = rl(torch.tensor(logs(policy), dtype=dtype), logs(engine), advantages, mask, denominator=7.0)
    pg = -1.2 + 0.0 + 2 / 21 * 0.70625 * 30
    regulariser = 1e-3 * sum(math.log(p / q) ** 2 for p, q in zip(policy[:3], engine[:3], strict=True))
    assert float(loss) == pytest.approx((pg + regulariser) / 7, rel=1e-5)
    measured = results(stats)
    assert measured["loss/total"] == pytest.approx(float(loss))
    assert measured["loss/policy"] == pytest.approx(pg / 7, rel=1e-5)
    assert measured["loss/regulariser"] == pytest.approx(regulariser / 7, rel=1e-5)


STREAM = st.integers(1, 24).flatmap(
    lambda size: st.tuples(
        st.lists(st.floats(-6, 0), min_size=size, max_size=size),
        st.lists(st.floats(-6, 0) | st.just(NAN) | st.just(-math.inf), min_size=size, max_size=size),
        st.lists(st.sampled_from([-1.0, 0.0, 0.25, 2.0]), min_size=size, max_size=size),
        st.lists(st.booleans(), min_size=size, max_size=size),
        st.lists(st.integers(0, 2), min_size=size, max_size=size),
    )
)


@given(STREAM)
def test_gradient_and_metrics_do_not_depend_on_how_tokens_are_split(
    tokens: tuple[list[float], list[float], list[float], list[bool], list[int]],
) -> None:
    """Three parts of any sizes, empty ones too, in any mix of ranks and microbatches, against one batch."""
    policy, engine, advantages, mask, part_of = tokens
    size = max(1, int(trained_mask(np.array(mask), np.array(engine)).sum()))
    whole = torch.tensor(policy, dtype=torch.float64, requires_grad=True)
    loss, stats = rl(whole, engine, advantages, mask, denominator=size)
    loss.backward()
    split = torch.tensor(policy, dtype=torch.float64, requires_grad=True)
    losses, metrics = [], []
    for part in range(3):
        picked = [t for t, owner in enumerate(part_of) if owner == part]
        one = [[stream[t] for t in picked] for stream in (engine, advantages, mask)]
        part_loss, part_stats = rl(split[picked], *one, denominator=size)  # type: ignore[arg-type]
        part_loss.backward()
        losses.append(part_loss.detach())
        metrics.append(part_stats.metrics)
    torch.testing.assert_close(split.grad, whole.grad)
    torch.testing.assert_close(torch.stack(losses).sum(), loss.detach())
    merged = merge_metrics(metrics)
    assert merged.keys() == stats.metrics.keys()
    for name, value in stats.metrics.items():
        assert merged[name].result() == pytest.approx(value.result(), rel=1e-9, abs=1e-12, nan_ok=True), name


def test_nothing_outside_the_trained_tokens_leaks_into_loss_gradient_or_metrics() -> None:
    policy, engine, advantages = [-0.5, -1.0, -2.0], [-0.6, -0.9, -2.5], [1.0, -1.0, 0.5]
    clean = torch.tensor(policy, requires_grad=True)
    loss, stats = rl(clean, engine, advantages, denominator=3)
    loss.backward()
    poisoned = torch.tensor([*policy, NAN, math.inf, NAN, NAN, -1.0], requires_grad=True)
    poisoned_loss, poisoned_stats = rl(
        poisoned,
        [*engine, NAN, math.inf, -math.inf, -1.0, -math.inf],
        [*advantages, NAN, math.inf, NAN, 1.0, 3.0],
        [True, True, True, False, False, False, False, True],
        denominator=3,
    )
    poisoned_loss.backward()
    assert torch.equal(poisoned_loss.detach(), loss.detach())
    assert poisoned.grad is not None and clean.grad is not None
    assert poisoned.grad.tolist() == [*clean.grad.tolist(), 0, 0, 0, 0, 0]
    assert results(poisoned_stats) == pytest.approx(results(stats) | {"tokens/missing_logp": 1.0})


def test_missing_log_probs_leave_t_and_are_counted() -> None:
    policy = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    loss, stats = rl(policy, [-1.5, NAN, -math.inf], [1.0, 1.0, 1.0])
    loss.backward()
    assert loss.isfinite()
    assert policy.grad is not None and policy.grad[0] != 0 and policy.grad[1:].tolist() == [0, 0]
    measured = results(stats)
    assert (measured["tokens/trained"], measured["tokens/missing_logp"]) == (1, 2)
    assert stats.kept[1:].all() and (stats.gradient_scale[1:] == 1).all()


def test_trained_mask_is_one_rule_for_both_array_kinds() -> None:
    mask, engine = [True, True, True, True, False], [-1.0, NAN, -math.inf, math.inf, -1.0]
    want = [True, False, False, False, False]
    with np.errstate(all="raise"):
        from_numpy = trained_mask(np.array(mask), np.array(engine, dtype=np.float32))
    assert from_numpy.dtype == bool and from_numpy.tolist() == want
    from_torch = trained_mask(torch.tensor(mask), torch.tensor(engine))
    assert from_torch.dtype == torch.bool and from_torch.tolist() == want


@pytest.mark.parametrize("size", [0, 3])
def test_a_batch_without_trained_tokens_has_loss_zero_and_zero_gradients(size: int) -> None:
    policy = torch.full((size,), -1.0, requires_grad=True)
    loss, stats = rl(policy, [NAN] * size, [1.0] * size, [False] * size, denominator=12)
    (loss + sft_loss(policy, torch.zeros(size, dtype=torch.bool), denominator=12)).backward()
    assert float(loss.detach()) == 0
    assert policy.grad is not None and policy.grad.tolist() == [0.0] * size
    assert stats.metrics["tokens/trained"] == Sum(0) and stats.metrics["ratio/mean"] == Mean(0, 0)


def test_mask_rates_leave_out_tokens_without_advantage() -> None:
    """Two of A > 0 (one masked), one of A < 0 (masked), two of A = 0 (one outside its bound)."""
    policy, engine = logs([0.9, 0.5, 0.1, 0.1, 0.5]), logs([0.5, 0.5, 0.5, 0.5, 0.5])
    _, stats = rl(policy, engine, [1.0, 1.0, -1.0, 0.0, 0.0])
    assert stats.kept.tolist() == [False, True, False, False, True]
    assert stats.metrics["mask/share"] == Mean(2, 3)
    assert stats.metrics["mask/share_positive"] == Mean(1, 2)
    assert stats.metrics["mask/share_negative"] == Mean(1, 1)


def test_measurements_of_the_ratio_and_the_bound() -> None:
    policy, engine = logs([0.6, 0.3, 0.1]), logs([0.5, 0.01, 0.5])
    entropy = torch.tensor([0.5, 1.0, 1.5])
    _, stats = rl(policy, engine, [1.0, -0.70625, -1.0], entropy=entropy)
    distances = [abs(p - q) for p, q in zip(policy, engine, strict=True)]
    assert results(stats) == pytest.approx(
        {
            **{name: stats.metrics[name].result() for name in stats.metrics if name.startswith("loss/")},
            "regulariser/max_weight": 2e-3 * math.log(30),
            "tokens/trained": 3,
            "tokens/missing_logp": 0,
            "ratio/mean": (1.2 + 30 + 0.2) / 3,
            "ratio/capped_mean": (1.2 + 30) / 3,
            "ratio/capped_square_mean": (1.2**2 + 30**2) / 3,
            "log_ratio/abs_mean": sum(distances) / 3,
            "log_ratio/abs_max": math.log(30),
            "mask/share": 1 / 3,
            "mask/share_positive": 0,
            "mask/share_negative": 1 / 2,
            "gradient_scale/mean": (1 + 2 / 21) / 2,
            "gradient_scale/share_scaled": 1 / 2,
            "entropy": 1.0,
        },
        rel=1e-5,
    )
    assert isinstance(stats.metrics["log_ratio/abs_max"], Max) and isinstance(stats.metrics["loss/total"], Sum)


def test_the_ratio_is_measured_uncapped() -> None:
    _, stats = rl([-0.5], [-60.5], [-1.0])
    assert stats.metrics["ratio/mean"].result() == pytest.approx(math.exp(60), rel=1e-4)


def test_masked_tokens_are_regularised_unless_only_kept_ones_are() -> None:
    policy, engine = torch.tensor(logs([0.9]), requires_grad=True), logs([0.5])
    for tokens, slope in (("all", 2e-3 * math.log(1.8)), ("kept", 0.0)):
        loss, stats = rl(policy, engine, [1.0], config=LossConfig(regulariser_tokens=tokens))  # type: ignore[arg-type]
        (gradient,) = torch.autograd.grad(loss, policy)
        assert float(gradient) == pytest.approx(slope, rel=1e-5)
        assert stats.metrics["regulariser/max_weight"].result() == pytest.approx(slope, rel=1e-5)


def test_streams_of_the_stats_are_detached_and_aligned() -> None:
    policy = torch.tensor([-1.0, -2.0], requires_grad=True)
    _, stats = rl(policy, [-1.0, NAN], [1.0, 1.0])
    for stream in (stats.policy_logp, stats.kept, stats.gradient_scale):
        assert not stream.requires_grad and stream.shape == (2,)
    assert torch.equal(stats.policy_logp, policy.detach())


def test_sft_loss_is_the_mean_negative_log_likelihood() -> None:
    logp = torch.tensor([-1.0, NAN, -3.0, -0.5], requires_grad=True)
    loss = sft_loss(logp, torch.tensor([True, False, True, False]), denominator=8)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(0.5)
    assert logp.grad is not None and logp.grad.tolist() == [-0.125, 0, -0.125, 0]


@pytest.mark.parametrize(
    ("policy", "engine", "advantage", "says"),
    [
        (NAN, -1.0, 1.0, "policy_logp of trained tokens must be finite and at most 0, got nan at position 1"),
        (-math.inf, -1.0, 1.0, "policy_logp .* got -inf at position 1"),
        (0.5, -1.0, 1.0, r"policy_logp .* got 0\.5 at position 1"),
        (-1.0, 0.25, 1.0, r"engine_logp .* at most 0, got 0\.25 at position 1"),
        (-1.0, -1.0, NAN, "advantages of trained tokens must be finite, got nan at position 1"),
    ],
)
def test_broken_values_of_trained_tokens_are_refused(policy: float, engine: float, advantage: float, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        rl([-1.0, policy], [-1.0, engine], [1.0, advantage])
    rl([-1.0, policy], [-1.0, engine], [1.0, advantage], [True, False])
    if "policy_logp" in says:
        with pytest.raises(ValueError, match=says):
            sft_loss(torch.tensor([-1.0, policy]), torch.ones(2, dtype=torch.bool), denominator=2)


def test_a_log_prob_rounded_to_just_above_zero_is_taken() -> None:
    loss, _ = rl([1e-6], [1e-6], [1.0])
    assert float(loss) == pytest.approx(-1.0)


def test_bad_arguments_are_refused() -> None:
    one, mask = torch.zeros(1), torch.ones(1, dtype=torch.bool)
    for denominator in (0, -1, NAN):
        with pytest.raises(ValueError, match=f"denominator must be above 0 and finite, got {denominator}"):
            rl([-1.0], [-1.0], [1.0], denominator=denominator)
        with pytest.raises(ValueError, match=f"denominator must be above 0 and finite, got {denominator}"):
            sft_loss(one, mask, denominator=denominator)
    with pytest.raises(ValueError, match=r"loss_mask must be bool, got torch\.int64"):
        rl_loss(RlStreams(one, one, one, mask.long()), config=CONFIG, denominator=1)
    with pytest.raises(ValueError, match=r"advantages must be aligned with policy_logp \[1\], got \[2\]"):
        rl_loss(RlStreams(one, one, torch.zeros(2), mask), config=CONFIG, denominator=1)
    with pytest.raises(ValueError, match="entropy must be aligned"):
        rl_loss(RlStreams(one, one, one, mask, entropy=torch.zeros(2)), config=CONFIG, denominator=1)
    with pytest.raises(ValueError, match=r"loss_mask must be aligned with policy_logp \[1\], got \[2\]"):
        sft_loss(one, torch.ones(2, dtype=torch.bool), denominator=1)
