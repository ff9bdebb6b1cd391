"""The terms beside the policy loss, as the trainer gets them: what they add, measure, and refuse."""

import math
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rl.loss.config import LossConfig
from megatron_rl.loss.head import LossStats, RlStreams, rl_loss
from megatron_rl.loss.kl import kl_estimate
from megatron_rl.telemetry.values import Mean, Sum

NAN = math.nan
ALL: dict[str, Any] = {
    "kl": {"kind": "k3+", "coef": 0.5, "sequence_exact": True},
    "entropy": {"coef": 0.25, "tokens": "after_observation"},
    "proximal": {"guard": {"kind": "clamp", "low": 0.5, "high": 2.0}},
}


def stream(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def batch(size: int = 4) -> RlStreams:
    """One document: trained, observation, trained, distilled tokens, as often as fits, off-policy everywhere."""
    t = torch.arange(size)
    x = t.double()
    return RlStreams(
        policy_logp=(-1 - 0.1 * x).requires_grad_(),
        engine_logp=-1.2 - 0.05 * x,
        advantages=1 - 0.5 * x,
        loss_mask=t % 4 != 1,
        sequence_ids=torch.zeros(size, dtype=torch.int32),
        loss_weight=1 + 0.5 * x,
        entropy=(1 + x).requires_grad_(),
        reference_logp=-0.9 - 0.3 * x,
        proximal_logp=-1.1 - 0.08 * x,
        distill_kl=(2 + x).requires_grad_(),
        distill_mask=t % 4 == 3,
    )


def loss_of(streams: RlStreams, *, denominator: float = 1.0, **options: Any) -> tuple[Tensor, LossStats]:
    loss_options = {"tau": 0.0, **options}
    arguments = {name: loss_options.pop(name) for name in ("kl_coef", "distill_coef") if name in loss_options}
    return rl_loss(streams, config=LossConfig.model_validate(loss_options), denominator=denominator, **arguments)


def results(stats: LossStats) -> dict[str, float]:
    return {name: value.result() for name, value in stats.metrics.items()}


def test_the_kl_adds_its_estimate_over_the_trained_tokens_times_coefficient_and_weight() -> None:
    streams = batch()
    kl = kl_estimate(streams.policy_logp, stream(-0.9, -1.2, -1.5, -1.8), "k3+").detach()
    plain, _ = loss_of(streams, denominator=7.0)
    want = 0.5 * (kl[0] * 1.0 + kl[2] * 2.0) / 7
    with_kl, stats = loss_of(streams, denominator=7.0, kl={"coef": 0.5})
    torch.testing.assert_close((with_kl - plain).detach(), want)
    assert results(stats)["kl/loss"] == pytest.approx(float(want))
    adaptive, _ = loss_of(streams, denominator=7.0, kl={"coef": 0.5}, kl_coef=0.05)
    torch.testing.assert_close((adaptive - plain).detach(), want / 10)


def test_a_reference_without_a_term_is_measured_and_pushes_nothing() -> None:
    streams = batch()
    loss, stats = loss_of(streams)
    without, bare = loss_of(replace(streams, reference_logp=None))
    assert torch.equal(loss, without) and "kl/reference_k3" not in bare.metrics
    k3 = kl_estimate(streams.policy_logp.detach(), stream(-0.9, -1.2, -1.5, -1.8), "k3")
    assert results(stats)["kl/reference_k3"] == pytest.approx(float(k3[0] + k3[2]) / 2)
    in_reward, rewarded = loss_of(streams, kl={"placement": "reward"}, kl_coef=0.5)
    assert torch.equal(in_reward, loss) and "kl/loss" not in rewarded.metrics and "kl/reference_k3" in rewarded.metrics


def test_the_entropy_bonus_is_given_to_its_tokens_and_only_then_has_a_gradient() -> None:
    streams = batch()
    assert streams.entropy is not None
    plain, measured = loss_of(streams, denominator=2.0)
    assert torch.autograd.grad(plain, streams.entropy, allow_unused=True, retain_graph=True) == (None,)
    assert measured.metrics["entropy"] == Mean(1 + 3, 2)
    for tokens, slopes in (("all", [-0.125, 0, -0.25, 0]), ("after_observation", [0, 0, -0.25, 0])):
        loss, stats = loss_of(streams, denominator=2.0, entropy={"coef": 0.25, "tokens": tokens})
        assert torch.autograd.grad(loss, streams.entropy, retain_graph=True)[0].tolist() == slopes
        bonus = float(stream(*slopes) @ streams.entropy.detach())
        assert results(stats)["entropy/bonus"] == pytest.approx(bonus)
        torch.testing.assert_close((loss - plain).detach(), torch.tensor(bonus, dtype=torch.float64))


def test_a_sampled_token_without_an_engine_log_prob_is_no_observation() -> None:
    """Token 1 is sampled and leaves T; token 2 follows it and gets no bonus for observations."""
    streams = replace(
        batch(3), loss_mask=torch.ones(3, dtype=torch.bool), distill_mask=None, distill_kl=None,
        engine_logp=stream(-1.0, NAN, -1.0),
    )  # fmt: skip
    loss, _ = loss_of(streams, entropy={"coef": 0.25, "tokens": "after_observation"})
    assert streams.entropy is not None
    assert torch.autograd.grad(loss, streams.entropy)[0].tolist() == [0, 0, 0]


def test_a_distilled_token_is_no_observation() -> None:
    """Token 1 was sampled, although only the teacher's loss reads it."""
    streams = replace(batch(3), distill_mask=torch.tensor([False, True, False]))
    loss, _ = loss_of(streams, entropy={"coef": 0.25, "tokens": "after_observation"})
    assert streams.entropy is not None
    assert torch.autograd.grad(loss, streams.entropy)[0].tolist() == [0, 0, 0]


def test_distilled_tokens_leave_t_and_add_their_kl_to_the_teacher() -> None:
    """Token 3 would be trained; as a distilled one it has no other term, whatever its log-probs are."""
    streams = batch()
    loss, stats = loss_of(streams, denominator=2.0, distill_coef=0.5, **ALL)
    assert streams.distill_kl is not None
    gradients = torch.autograd.grad(loss, (streams.policy_logp, streams.distill_kl))
    assert gradients[0][3] == 0 and gradients[0][0] != 0
    assert gradients[1].tolist() == [0, 0, 0, 0.5 * 2.5 / 2]
    assert stats.metrics["loss/distill"] == Sum(0.5 * 2.5 * 5 / 2)
    assert stats.metrics["tokens/distilled"] == Sum(1) and stats.metrics["tokens/trained"] == Sum(2)
    assert stats.metrics["tokens/missing_logp"] == Sum(0)
    unknown = replace(streams, engine_logp=streams.engine_logp.where(torch.arange(4) != 3, NAN))
    assert torch.equal(loss_of(unknown, denominator=2.0, distill_coef=0.5, **ALL)[0], loss)


def test_the_weights_of_a_reduction_weigh_every_term() -> None:
    streams = batch()
    doubled = replace(streams, loss_weight=2 * streams.loss_weight)  # type: ignore[operator]  # pyright: ignore[reportOptionalOperand]
    torch.testing.assert_close(loss_of(doubled, **ALL)[0], 2 * loss_of(streams, **ALL)[0])
    ones = replace(streams, loss_weight=torch.ones(4, dtype=torch.float64))
    torch.testing.assert_close(loss_of(ones, **ALL)[0], loss_of(replace(streams, loss_weight=None), **ALL)[0])


def test_nothing_outside_the_tokens_that_count_leaks_from_any_stream() -> None:
    """Padding and observations hold NaN in every stream; value, gradients and metrics are those of clean ones."""
    streams = batch(12)
    trained = streams.trained
    names = ("policy_logp", "engine_logp", "advantages", "entropy", "reference_logp", "proximal_logp")
    poisoned = {name: torch.where(trained, getattr(streams, name).detach(), NAN).requires_grad_() for name in names}
    counted = trained | streams.distilled
    assert streams.loss_weight is not None and streams.distill_kl is not None
    poisoned["loss_weight"] = torch.where(counted, streams.loss_weight, NAN)
    poisoned["distill_kl"] = torch.where(streams.distilled, streams.distill_kl.detach(), NAN).requires_grad_()
    dirty = replace(streams, **poisoned)
    options = {**ALL, "tau": 0.1}
    clean_loss, clean = loss_of(streams, **options)
    dirty_loss, stats = loss_of(dirty, **options)
    assert torch.equal(clean_loss, dirty_loss) and results(stats) == results(clean)
    leaves = ("policy_logp", "entropy", "distill_kl")
    for want, got in zip(
        torch.autograd.grad(clean_loss, [getattr(streams, name) for name in leaves]),
        torch.autograd.grad(dirty_loss, [getattr(dirty, name) for name in leaves]),
        strict=True,
    ):
        assert torch.equal(want, got) and got.isfinite().all()


@pytest.mark.parametrize("kind", ["btv", "dppo_kl", "ppo_clip", "cispo", "gspo", "tis", "reject", "none"])
def test_observations_between_tokens_change_nothing(kind: str) -> None:
    """The loss of the tokens that count, taken out of their documents; sums and means over documents too."""
    streams = replace(batch(12), sequence_ids=torch.arange(12) // 6)
    counted = streams.trained | streams.distilled
    alone = {field.name: getattr(streams, field.name)[counted] for field in fields(streams)}
    options = {**ALL, "policy": {"kind": kind}, "entropy": {"coef": 0.25}, "tau": 0.1}
    loss, stats = loss_of(streams, **options)
    alone_loss, alone_stats = loss_of(RlStreams(**alone), **options)
    torch.testing.assert_close(alone_loss, loss)
    assert results(alone_stats) == pytest.approx(results(stats), nan_ok=True)


@pytest.mark.parametrize("size", [0, 5])
@pytest.mark.parametrize("kind", ["btv", "dppo_kl", "ppo_clip", "cispo", "gspo", "tis", "reject", "none"])
def test_a_batch_without_tokens_that_count_has_loss_zero_and_zero_gradients(kind: str, size: int) -> None:
    nothing = torch.zeros(size, dtype=torch.bool)
    streams = replace(batch(size), loss_mask=nothing, distill_mask=nothing)
    loss, stats = loss_of(streams, policy={"kind": kind}, **ALL)
    loss.backward()
    assert float(loss.detach()) == 0
    for leaf in (streams.policy_logp, streams.entropy, streams.distill_kl):
        assert leaf is not None and leaf.grad is not None and leaf.grad.tolist() == [0.0] * size
    assert stats.metrics["ratio/mean"] == Mean(0, 0) and stats.metrics["tokens/trained"] == Sum(0)
    assert stats.kept.all() and (stats.gradient_scale == 1).all(), "nothing is said to be masked where nothing counts"


def test_the_factors_of_a_decoupled_ratio_and_its_guard_are_measured() -> None:
    streams = replace(batch(), loss_weight=None, engine_logp=stream(-1.2, -1.25, -4.0, -1.35))
    _, stats = loss_of(streams, g_max=None, **ALL)
    measured = results(stats)
    movement, engine = (-1.0 + 1.1, -1.2 + 1.26), (-1.1 + 1.2, -1.26 + 4.0)
    assert measured["log_ratio/movement_abs_mean"] == pytest.approx(sum(map(abs, movement)) / 2)
    assert measured["log_ratio/engine_abs_mean"] == pytest.approx(sum(engine) / 2)
    assert measured["ratio/engine_mean"] == pytest.approx(sum(map(math.exp, engine)) / 2)
    assert measured["guard/share"] == 0.5
    weights = [math.exp(movement[0] + engine[0]), math.exp(movement[1]) * 2.0]
    assert measured["ratio/capped_mean"] == pytest.approx(sum(weights) / 2)
    assert measured["ratio/capped_square_mean"] == pytest.approx(sum(w * w for w in weights) / 2)
    assert "guard/share" not in results(loss_of(streams)[1])


class ValuesRead(TorchDispatchMode):
    """Counts what would make the host wait for a device: a value read, or a shape that depends on one."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        waits = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_consecutive", "equal")
        if func.overloadpacket.__name__ in waits:
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["btv", "gspo", "ppo_clip"])
def test_the_host_waits_for_no_value_before_the_one_transfer_of_the_metrics(kind: str) -> None:
    streams = batch(12)
    with ValuesRead() as reads:
        bool(stream(1.0))
        assert reads.names == ["_local_scalar_dense"]
        loss_of(streams, policy={"kind": kind}, **ALL)
    assert reads.names == ["_local_scalar_dense"]


# Bad input.


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("reference_logp", NAN, "reference_logp of trained tokens must be finite and at most 0, got nan at position 2"),
        ("reference_logp", 0.5, r"reference_logp .* got 0\.5 at position 2"),
        ("proximal_logp", -math.inf, "proximal_logp .* got -inf at position 2"),
        ("entropy", NAN, "entropy of trained tokens must be finite, got nan at position 2; look for NaN weights"),
        ("loss_weight", math.inf, "loss_weight .* got inf at position 2"),
        ("policy_logp", NAN, "policy_logp .* got nan at position 2"),
    ],
)
def test_broken_values_of_trained_tokens_are_refused(name: str, value: float, says: str) -> None:
    streams = batch()
    broken = getattr(streams, name).detach().clone()
    broken[2] = value
    with pytest.raises(ValueError, match=says):
        loss_of(replace(streams, **{name: broken}), **ALL)
    broken = getattr(streams, name).detach().clone()
    broken[1] = value
    loss_of(replace(streams, **{name: broken}), **ALL)


def test_a_document_that_comes_back_after_another_is_refused() -> None:
    ids = torch.arange(12) // 4
    loss_of(replace(batch(12), sequence_ids=ids), policy={"kind": "gspo"})
    with pytest.raises(ValueError, match=r"sequence_ids .* those of documents in one piece, got 0 at position 8"):
        loss_of(replace(batch(12), sequence_ids=ids % 2), policy={"kind": "gspo"})


def test_a_broken_distillation_is_refused() -> None:
    with pytest.raises(ValueError, match=r"distill_kl .* must be finite, got nan at position 3"):
        loss_of(replace(batch(), distill_kl=stream(0, 0, 0, NAN)))


@pytest.mark.parametrize(
    ("missing", "options", "says"),
    [
        ("reference_logp", {"kl": {}}, r"reference_logp must be given with loss\.kl, got None"),
        ("proximal_logp", {"proximal": {}}, r"proximal_logp must be given with loss\.proximal, got None"),
        ("entropy", {"entropy": {"coef": 1}}, r"entropy must be given with loss\.entropy, got None"),
        ("sequence_ids", {"policy": {"kind": "gspo"}}, "sequence_ids must be given with gspo"),
        ("sequence_ids", {"kl": {"sequence_exact": True}}, "sequence_ids must be given"),
        ("sequence_ids", {"entropy": {"coef": 1, "tokens": "after_observation"}}, "sequence_ids must be given"),
        ("distill_kl", {}, "distill_kl must be given with distill_mask, got None"),
        ("distill_mask", {}, "distill_mask must be given with distill_kl, got None"),
    ],
)
def test_a_stream_that_the_objective_needs_and_lacks_is_named(missing: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        loss_of(replace(batch(), **{missing: None}), **options)


def test_bad_arguments_are_refused_with_their_value() -> None:
    for name in ("sequence_ids", "loss_weight", "entropy", "reference_logp", "proximal_logp", "distill_kl"):
        with pytest.raises(ValueError, match=rf"{name} must be aligned with policy_logp \[4\], got \[2\]"):
            loss_of(replace(batch(), **{name: torch.zeros(2)}))
    with pytest.raises(ValueError, match=r"distill_mask must be bool, got torch\.float64"):
        loss_of(replace(batch(), distill_mask=stream(0, 0, 0, 1)))
    with pytest.raises(ValueError, match=r"sequence_ids must be integers, got torch\.float64"):
        loss_of(replace(batch(), sequence_ids=stream(0, 0, 0, 0)))
    with pytest.raises(ValueError, match=r"kl_coef has no effect without loss\.kl, got 0\.1"):
        loss_of(batch(), kl_coef=0.1)
    for coef in (-0.1, NAN, math.inf):
        with pytest.raises(ValueError, match=f"kl_coef must be finite and not negative, got {coef}"):
            loss_of(batch(), kl={}, kl_coef=coef)
        with pytest.raises(ValueError, match=f"distill_coef must be finite and not negative, got {coef}"):
            loss_of(batch(), distill_coef=coef)
