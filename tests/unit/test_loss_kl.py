"""KL to the reference: values and gradients against distributions small enough to write out."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_rl.loss.config import LossConfig
from megatron_rl.loss.kl import AdaptiveKL, KlKind, kl_estimate, sequence_kl_loss
from megatron_rl.loss.policy import policy_loss
from megatron_rl.loss.regularise import entropy_bonus

KINDS: list[KlKind] = ["k1", "k2", "k3", "k1+", "k2+", "k3+"]


def fifty_outcomes(scale: float) -> tuple[Tensor, Tensor]:
    """(log p, log p_ref) of 50 outcomes, float64."""
    generator = torch.Generator().manual_seed(0)
    z, e = torch.randn(50, generator=generator).double(), torch.randn(50, generator=generator).double()
    return z.log_softmax(0), (z + scale * e).log_softmax(0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("scale", "kl", "spread_k1", "spread_k3", "mean_k2"),
    [(0.05, 0.00101, 44.836, 1.255, 1.011), (1.0, 0.3247, 2.776, 1.380, 1.4135), (2.0, 1.0841, 1.663, 1.843, 2.041)],
)
def test_the_estimators_have_the_exact_moments_of_fifty_outcomes(
    scale: float, kl: float, spread_k1: float, spread_k3: float, mean_k2: float, dtype: torch.dtype
) -> None:
    """Mean and spread over KL, by enumeration; k1 and k3 are unbiased, k2 is not."""
    logp, ref = fifty_outcomes(scale)
    p = logp.exp()
    exact = float((p * (logp - ref)).sum())
    assert exact == pytest.approx(kl, abs=0.00006)

    def moments(kind: KlKind) -> tuple[float, float]:
        values = kl_estimate(logp.to(dtype), ref.to(dtype), kind).double()
        mean = float((p * values).sum())
        return mean / exact, math.sqrt(float((p * values**2).sum()) - mean**2) / exact

    assert moments("k1") == pytest.approx((1, spread_k1), rel=1e-3)
    assert moments("k3") == pytest.approx((1, spread_k3), rel=1e-3)
    assert moments("k2")[0] == pytest.approx(mean_k2, rel=1e-3)
    for kind in ("k1", "k2", "k3"):
        assert moments(f"{kind}+") == moments(kind)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


LOGITS = st.lists(st.floats(-2, 2), min_size=2, max_size=8)


def expected_gradient(logits: Tensor, ref: Tensor, kind: KlKind) -> Tensor:
    """Average over the policy's own tokens of the gradient of the estimator as a loss, outcome by outcome."""
    logits = logits.clone().requires_grad_()
    logp = logits.log_softmax(0)
    return torch.autograd.grad((logp.exp().detach() * kl_estimate(logp, ref, kind)).sum(), logits)[0]


@settings(max_examples=40)
@given(logits=LOGITS, other=LOGITS)
def test_each_estimator_descends_the_divergence_its_table_names(logits: list[float], other: list[float]) -> None:
    size = min(len(logits), len(other))
    z = torch.tensor(logits[:size], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor(other[:size], dtype=torch.float64).log_softmax(0)
    logp = z.log_softmax(0)
    reverse = torch.autograd.grad((logp.exp() * (logp - ref)).sum(), z, retain_graph=True)[0]
    forward = torch.autograd.grad((ref.exp() * (ref - logp)).sum(), z)[0]
    torch.testing.assert_close(expected_gradient(z.detach(), ref, "k1"), torch.zeros_like(ref), atol=1e-12, rtol=0)
    for kind in ("k2", "k1+", "k2+", "k3+"):
        torch.testing.assert_close(expected_gradient(z.detach(), ref, kind), reverse)
    torch.testing.assert_close(expected_gradient(z.detach(), ref, "k3"), forward)


@pytest.mark.parametrize("plain", ["k1", "k2", "k3"])
def test_a_plus_form_has_the_value_of_its_name_and_the_gradient_of_k2(plain: KlKind) -> None:
    plus: KlKind = f"{plain}+"  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]
    logp, ref = fifty_outcomes(2.0)
    logp = logp.requires_grad_()
    assert torch.equal(kl_estimate(logp, ref, plus).detach(), kl_estimate(logp, ref, plain).detach())
    gradient, squared = (torch.autograd.grad(kl_estimate(logp, ref, kind).sum(), logp)[0] for kind in (plus, "k2"))
    torch.testing.assert_close(gradient, squared)


def test_k3_is_clamped_where_exp_would_overflow_and_still_pulls() -> None:
    logp = torch.tensor([-60.0, -0.1], requires_grad=True)
    value = kl_estimate(logp, torch.tensor([-0.1, -60.0]), "k3")
    torch.testing.assert_close(value.detach(), torch.tensor([math.exp(10) - 11, math.exp(-10) + 9]))
    slopes = torch.autograd.grad(value.sum(), logp)[0]
    torch.testing.assert_close(slopes, torch.tensor([1 - math.exp(10), 1 - math.exp(-10)]))


def test_k3_keeps_its_digits_near_the_reference() -> None:
    logp = torch.full((3,), -1.0)
    ref = logp + torch.tensor([1e-3, -1e-3, 0.0])
    exact = (ref.double() - logp.double()).expm1() - (ref.double() - logp.double())
    torch.testing.assert_close(kl_estimate(logp, ref, "k3").double(), exact, rtol=1e-3, atol=0)


def test_no_gradient_flows_into_the_reference() -> None:
    logp, ref = torch.full((2,), -1.0, requires_grad=True), torch.full((2,), -2.0, requires_grad=True)
    for kind in KINDS:
        kl_estimate(logp, ref, kind).sum().backward()
    sequence_kl_loss(logp, ref, torch.zeros(2, dtype=torch.long)).sum().backward()
    assert logp.grad is not None and ref.grad is None


# Sequences.


def all_sequences(logits: list[Tensor], vocabulary: int) -> tuple[Tensor, Tensor]:
    """(every sequence [N, S], its log-probs per token [N, S]) of a model whose logits depend on the whole prefix.

    logits[t] is [vocabulary^t, vocabulary]: row of the prefix read as a number.
    """
    sequences = torch.tensor(list(itertools.product(range(vocabulary), repeat=len(logits))))
    rows = torch.zeros(len(sequences), dtype=torch.long)
    logps = []
    for step, table in enumerate(logits):
        logps.append(table.log_softmax(-1)[rows, sequences[:, step]])
        rows = rows * vocabulary + sequences[:, step]
    return sequences, torch.stack(logps, dim=1)


@pytest.mark.parametrize(("length", "vocabulary"), [(2, 4), (3, 3)])
def test_the_sequence_loss_has_the_exact_gradient_of_the_kl_of_sequences(length: int, vocabulary: int) -> None:
    """Every sequence weighed with its probability, as packed documents with untrained tokens between them."""
    generator = torch.Generator().manual_seed(1)

    def model() -> list[Tensor]:
        sizes = [(vocabulary**step, vocabulary) for step in range(length)]
        return [torch.randn(*size, generator=generator, dtype=torch.float64) for size in sizes]

    policy = [table.requires_grad_() for table in model()]
    sequences, logps = all_sequences(policy, vocabulary)
    _, refs = all_sequences(model(), vocabulary)
    probability = logps.sum(1).exp()
    exact = torch.autograd.grad((probability * (logps.sum(1) - refs.sum(1))).sum(), policy, retain_graph=True)

    count = len(sequences)
    ids = torch.arange(count)[:, None].expand(count, length)
    gap = torch.full((count, 1), math.nan, dtype=torch.float64)
    packed_ids = torch.cat([ids[:, :1], torch.full((count, 1), -1), ids[:, 1:]], 1).reshape(-1)
    packed, packed_refs = (torch.cat([x[:, :1], gap, x[:, 1:]], 1).reshape(-1) for x in (logps, refs))
    for kind in ("k2", "k1+", "k3+"):
        loss = sequence_kl_loss(packed, packed_refs, packed_ids, kind=kind)
        weights = probability.detach().repeat_interleave(length + 1)
        got = torch.autograd.grad((weights * loss).sum(), policy, retain_graph=True)
        torch.testing.assert_close(got, exact)
    per_token = (
        probability.detach()[:, None] * kl_estimate(logps.reshape(-1), refs.reshape(-1), "k2").view_as(logps)
    ).sum()
    local = torch.autograd.grad(per_token, policy)
    torch.testing.assert_close(local[-1], exact[-1], msg="the last token has no future")
    assert (local[0] - exact[0]).norm() > 0.05 * exact[0].norm(), "a per-token loss leaves the future out"


def test_a_token_answers_for_the_later_kl_as_k3_whatever_the_kind() -> None:
    """k1 there has the same mean and far more spread."""
    logp, ref = torch.tensor([[-1.0, -2.0, -0.5], [-1.5, -1.0, -2.0]], dtype=torch.float64)
    k1, k3 = logp - ref, torch.expm1(ref - logp) + logp - ref
    for kind in ("k2", "k1+", "k3+"):
        leaf = logp.clone().requires_grad_()
        loss = sequence_kl_loss(leaf, ref, torch.zeros(3, dtype=torch.long), kind=kind)
        want = torch.stack([k1[0] + k3[1] + k3[2], k1[1] + k3[2], k1[2]])
        torch.testing.assert_close(torch.autograd.grad(loss.sum(), leaf)[0], want)


def test_the_value_of_the_sequence_loss_is_the_estimator_s() -> None:
    logp, ref = fifty_outcomes(1.0)
    ids = torch.arange(50) // 7
    for kind in ("k2", "k1+", "k2+", "k3+"):
        assert torch.equal(sequence_kl_loss(logp, ref, ids, kind=kind), kl_estimate(logp, ref, kind))
    empty = torch.zeros(0, requires_grad=True)
    assert sequence_kl_loss(empty, empty, torch.zeros(0, dtype=torch.long)).shape == (0,)


# Closed forms.


@pytest.mark.parametrize(("mean", "deviation"), [(0.1, 1.0), (0.5, 0.8), (-0.3, 1.3)])
def test_samples_give_the_kl_of_two_gaussians(mean: float, deviation: float) -> None:
    """KL(N(0, 1) || N(m, s)) = log s + (1 + m^2) / (2 s^2) - 1/2, within four standard errors."""
    x = torch.randn(400_000, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    logp = -(x**2) / 2
    ref = -(((x - mean) / deviation) ** 2) / 2 - math.log(deviation)
    exact = math.log(deviation) + (1 + mean**2) / (2 * deviation**2) - 0.5
    for kind in ("k1", "k3"):
        values = kl_estimate(logp, ref, kind)
        assert abs(float(values.mean()) - exact) <= 4 * float(values.std()) / math.sqrt(len(x))


REWARD = torch.tensor([1.0, 0.8, 0.2, 0.0, 1.2], dtype=torch.float64)
PRIOR = torch.tensor([0.05, 0.3, 0.35, 0.29, 0.01], dtype=torch.float64)


def climb(term: str, strength: float) -> tuple[Tensor, Tensor]:
    """(policy of a bandit after descending expected l_pg + term, gradient there); every arm weighed with p."""
    logits = PRIOR.log().clone().requires_grad_()
    config = LossConfig.model_validate({"policy": {"kind": "none"}, "g_max": None})
    gradient = torch.zeros_like(logits)
    for _ in range(500):
        logp = logits.log_softmax(0)
        loss, _ = policy_loss(logp, logp.detach(), REWARD, config=config)
        if term == "kl":
            loss = loss + strength * kl_estimate(logp, PRIOR.log(), "k3+")
        else:
            entropy = -(logp.exp() * logp).sum().expand(5)
            loss = loss + strength * entropy_bonus(entropy, torch.ones(5, dtype=torch.bool))
        gradient = torch.autograd.grad((logp.exp().detach() * loss).sum(), logits)[0]
        with torch.no_grad():
            logits -= 10 * gradient
    return logits.detach().softmax(0), gradient


def test_a_bandit_under_the_kl_reaches_the_tilted_reference_and_its_value() -> None:
    """The optimum of E[r] - beta KL is ref exp(r / beta) / Z, worth beta log Z."""
    beta = 0.3
    policy, gradient = climb("kl", beta)
    tilted = PRIOR * (REWARD / beta).exp()
    torch.testing.assert_close(policy, tilted / tilted.sum(), rtol=1e-5, atol=1e-7)
    value = (policy * REWARD).sum() - beta * (policy * (policy.log() - PRIOR.log())).sum()
    assert float(value) == pytest.approx(beta * math.log(float(tilted.sum())), rel=1e-9)
    assert gradient.abs().max() < 1e-6


def test_a_bandit_under_the_entropy_bonus_reaches_the_softmax_of_its_rewards() -> None:
    policy, _ = climb("entropy", 0.3)
    torch.testing.assert_close(policy, (REWARD / 0.3).softmax(0), rtol=1e-5, atol=1e-7)


# The coefficient.


def test_the_adaptive_coefficient_follows_its_rule() -> None:
    adaptive = AdaptiveKL(0.1, 0.5)
    for kl, factor in ((0.1, 1.0), (0.11, 1.01), (0.5, 1.02), (0.09, 0.99), (0.0, 0.98), (-1.0, 0.98)):
        before = adaptive.coef
        assert adaptive.update(kl) == adaptive.coef == pytest.approx(before * factor)


def test_the_adaptive_coefficient_settles_where_the_kl_meets_its_target() -> None:
    """A policy whose KL is 0.02 / coef."""
    adaptive = AdaptiveKL(0.1, 5.0)
    for _ in range(500):
        adaptive.update(0.02 / adaptive.coef)
    assert 0.02 / adaptive.coef == pytest.approx(0.1, rel=1e-3)


def test_bad_arguments_are_refused_with_their_value() -> None:
    one, two, ids = torch.zeros(1), torch.zeros(2), torch.zeros(1, dtype=torch.long)
    with pytest.raises(ValueError, match=r"kind must be k1, k2, k3, k1\+, k2\+ or k3\+, got 'k4'"):
        kl_estimate(one, one, "k4")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"ref_logp must be aligned with logp \[1\], got \[2\]"):
        kl_estimate(one, two, "k1")
    with pytest.raises(ValueError, match="needs a kind with the gradient of k2, got 'k3'"):
        sequence_kl_loss(one, one, ids, kind="k3")
    with pytest.raises(ValueError, match="sequence_ids must be aligned"):
        sequence_kl_loss(two, two, ids)
    with pytest.raises(ValueError, match="target of the adaptive KL must be above 0, got 0"):
        AdaptiveKL(0.0, 1.0)
    with pytest.raises(ValueError, match="coef of the adaptive KL must be above 0, got nan"):
        AdaptiveKL(1.0, math.nan)
    with pytest.raises(ValueError, match="the measured KL must be finite, got nan"):
        AdaptiveKL(1.0, 1.0).update(math.nan)
