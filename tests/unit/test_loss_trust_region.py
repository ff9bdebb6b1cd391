"""Every policy loss by name: what docs/objective.md says of it, line by line."""

import math
import runpy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.loss.config import LossConfig
from megatron_rl.loss.policy import policy_loss
from megatron_rl.loss.trust_region import binary_kl, dppo_kl_mask

SHARED = runpy.run_path(str(Path(__file__).parents[1] / "policy_losses.py"))
KINDS, config_of, tensor, loss_of, slope_of = (
    SHARED[name] for name in ("KINDS", "config_of", "tensor", "loss_of", "slope_of")
)

# The table of docs/objective.md. p: the policy's probability, mu: the sampler's, r = p / mu, all floats.


def binary_kl_of(p: float, mu: float) -> float:
    return mu * math.log(mu / p) + (1 - mu) * math.log((1 - mu) / (1 - p))


def clip(value: float, low: float, high: float) -> float:
    return max(low, min(high, value))


UNBOUNDED = math.inf


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    kind: str
    value: Callable[[float, float, float], float]
    """Of (p, mu, A): the loss of the token."""
    weight: Callable[[float, float, float], float]
    """Of (p, mu, A): the gradient on log p is -A times this, where it is not zero."""
    is_zero: Callable[[float, float, float], bool]
    """Of (p, mu, A): no gradient."""
    bound_positive: float
    """Largest weight (1 - p) for A > 0: the largest entry of the logit gradient over |A|."""
    bound_negative: float
    """The same for A <= 0."""


TABLE = [
    Row(
        "btv",
        value=lambda p, mu, a: 0.0 if (p - mu > 0.2 if a > 0 else p - mu < -0.2) else -a * p / mu,
        weight=lambda p, mu, a: p / mu,
        is_zero=lambda p, mu, a: p - mu > 0.2 if a > 0 else p - mu < -0.2,
        bound_positive=UNBOUNDED,
        bound_negative=UNBOUNDED,
    ),
    Row(
        "dppo_kl",
        value=lambda p, mu, a: 0.0 if binary_kl_of(p, mu) > 0.05 and (p > mu) == (a > 0) else -a * p / mu,
        weight=lambda p, mu, a: p / mu,
        is_zero=lambda p, mu, a: binary_kl_of(p, mu) > 0.05 and (p > mu) == (a > 0),
        bound_positive=UNBOUNDED,
        bound_negative=UNBOUNDED,
    ),
    Row(
        "ppo_clip",
        value=lambda p, mu, a: (
            max(-a * p / mu, -a * clip(p / mu, 0.8, 1.28))
            if a > 0
            else min(-a * 3.0, max(-a * p / mu, -a * clip(p / mu, 0.8, 1.28)))
        ),
        weight=lambda p, mu, a: p / mu,
        is_zero=lambda p, mu, a: p / mu > 1.28 if a > 0 else not 0.8 <= p / mu <= 3.0,
        bound_positive=1.28,
        bound_negative=3.0,
    ),
    Row(
        "cispo",
        value=lambda p, mu, a: -a * clip(p / mu, 0.0, 4.0) * math.log(p),
        weight=lambda p, mu, a: clip(p / mu, 0.0, 4.0),
        is_zero=lambda p, mu, a: False,
        bound_positive=4.0,
        bound_negative=4.0,
    ),
    Row(
        "gspo",
        value=lambda p, mu, a: max(-a * p / mu, -a * clip(p / mu, 1 - 3e-4, 1 + 4e-4)),
        weight=lambda p, mu, a: p / mu,
        is_zero=lambda p, mu, a: p / mu > 1 + 4e-4 if a > 0 else p / mu < 1 - 3e-4,
        bound_positive=1 + 4e-4,
        bound_negative=UNBOUNDED,
    ),
    Row(
        "tis",
        value=lambda p, mu, a: -a * min(p / mu, 2.0) * math.log(p),
        weight=lambda p, mu, a: min(p / mu, 2.0),
        is_zero=lambda p, mu, a: False,
        bound_positive=2.0,
        bound_negative=2.0,
    ),
    Row(
        "reject",
        value=lambda p, mu, a: -a * p / mu if 0.5 <= p / mu <= 5.0 else 0.0,
        weight=lambda p, mu, a: p / mu,
        is_zero=lambda p, mu, a: not 0.5 <= p / mu <= 5.0,
        bound_positive=5.0,
        bound_negative=5.0,
    ),
    Row(
        "none",
        value=lambda p, mu, a: -a * p / mu,
        weight=lambda p, mu, a: p / mu,
        is_zero=lambda p, mu, a: False,
        bound_positive=UNBOUNDED,
        bound_negative=UNBOUNDED,
    ),
]
ROWS = pytest.mark.parametrize("row", TABLE, ids=[row.kind for row in TABLE])

PROBABILITIES = [1e-6, 1e-3, 0.011, 0.1, 0.29, 0.4, 0.5, 0.62, 0.81, 0.93, 0.999]
GRID = [
    (p, mu, a)
    for mu in PROBABILITIES
    for p in [*PROBABILITIES, mu * 0.7, mu * 0.9, mu * 1.0002, mu * 1.00055, mu * 0.9998, min(0.9995, mu * 1.35)]
    for a in (2.0, 0.5, -0.25, -3.0)
]


@ROWS
def test_a_policy_loss_has_the_value_gradient_and_zeros_of_its_row(row: Row) -> None:
    p, mu, a = (tensor(*column) for column in zip(*GRID, strict=True))
    values, slopes = slope_of(config_of(row.kind), p.log(), mu.log(), a)
    weights = [0.0 if row.is_zero(*token) else row.weight(*token) for token in GRID]
    torch.testing.assert_close(values, tensor(*(row.value(*token) for token in GRID)), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(slopes, -a * tensor(*weights), rtol=1e-9, atol=1e-12)
    closed = [row.is_zero(*token) for token in GRID]
    assert (slopes[torch.tensor(closed)] == 0).all() and (slopes[~torch.tensor(closed)] != 0).all()
    assert any(closed) == (row.kind not in ("cispo", "tis", "none"))


@ROWS
def test_a_policy_loss_has_the_logit_bound_of_its_row(row: Row) -> None:
    """Largest entry over |A|, for tokens of all ratios: never above the bound, and near it for some."""
    mu = torch.logspace(-7, math.log10(0.99), 200, dtype=torch.float64)
    p, mu = (grid.reshape(-1) for grid in torch.meshgrid(mu, mu, indexing="ij"))
    near = torch.cat([mu * factor for factor in (1.00039, 1.279, 1.999, 2.999, 3.999, 4.999)])
    p, mu = torch.cat([p, near.clamp(max=0.99)]), torch.cat([mu, *[mu] * 6])
    for advantage, bound in ((1.5, row.bound_positive), (-1.5, row.bound_negative)):
        a = torch.full_like(p, advantage)
        _, slopes = slope_of(config_of(row.kind), p.log(), mu.log(), a)
        largest = float((slopes.abs() * (1 - p)).max()) / abs(advantage)
        if bound == UNBOUNDED:
            assert largest > 1000
        else:
            assert 0.99 * bound <= largest <= bound * (1 + 1e-9)


def test_the_page_has_one_row_for_each_policy_loss() -> None:
    page = (Path(__file__).parents[2] / "docs" / "objective.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1].strip().strip("`") for line in page.splitlines() if line.startswith("| `")]
    assert [name for name in rows if name in KINDS] == KINDS == [row.kind for row in TABLE]


@ROWS
def test_without_an_advantage_there_is_no_push(row: Row) -> None:
    p, mu, _ = (tensor(*column) for column in zip(*GRID, strict=True))
    values, slopes = slope_of(config_of(row.kind), p.log(), mu.log(), torch.zeros_like(p))
    assert (values == 0).all() and (slopes == 0).all()


@ROWS
def test_without_an_advantage_a_token_is_kept_as_one_that_falls(row: Row) -> None:
    p, mu, _ = (tensor(*column) for column in zip(*GRID, strict=True))
    at = {a: loss_of(config_of(row.kind), p.log(), mu.log(), torch.full_like(p, a))[1].kept for a in (-1.0, 0.0, 1.0)}
    assert torch.equal(at[0.0], at[-1.0])
    assert torch.equal(at[0.0], at[1.0]) == (row.kind in ("cispo", "tis", "reject", "none"))


@pytest.mark.parametrize("kind", KINDS)
def test_on_policy_every_policy_loss_is_the_plain_policy_gradient(kind: str) -> None:
    logp, a = tensor(-3.0, -0.01, -12.0), tensor(0.3, -0.7, 1.0)
    _, slopes = slope_of(config_of(kind, g_max=2.0), logp, logp, a)
    torch.testing.assert_close(slopes, -a)


def test_the_binary_kl_is_that_of_token_or_not_token() -> None:
    p, mu = tensor(0.3, 0.99, 1e-9, 1.0, 0.5, 0.5), tensor(0.1, 0.5, 0.4, 1.0, 0.5, 1e-9)
    want = [binary_kl_of(float(a), float(b)) if float(a) < 1 else 0.0 for a, b in zip(p, mu, strict=True)]
    torch.testing.assert_close(binary_kl(p.log(), mu.log()), tensor(*want), rtol=1e-6, atol=1e-9)
    assert dppo_kl_mask(p.log(), mu.log(), tensor(1, 1, -1, 1, -1, 1)).tolist() == [
        False,
        False,
        False,
        True,
        True,
        False,
    ]
    assert dppo_kl_mask(p.log(), mu.log(), tensor(-1, -1, 1, 1, -1, -1)).tolist() == [True] * 6


def test_the_binary_kl_is_a_lower_bound_of_the_whole_one() -> None:
    generator = torch.Generator().manual_seed(3)
    p, mu = (torch.randn(2, 500, 9, generator=generator, dtype=torch.float64) * 2).log_softmax(-1)
    whole = (mu.exp() * (mu - p)).sum(-1)
    assert (binary_kl(p[:, 0], mu[:, 0]) <= whole + 1e-12).all()


def test_gspo_gives_each_token_the_gradient_of_the_sequence_objective() -> None:
    """Against autograd through -A exp(mean log r) per document; token 2 does not count, document 1 stops."""
    policy = tensor(-1.0, -2.0, -9.0, -0.5, -1.0, -1.5, -0.7).requires_grad_()
    engine = tensor(-1.1, -1.9, -0.1, -0.50015, -1.4, -1.6, -0.9)
    a, ids = tensor(0.5, 0.5, 0.5, 0.5, 1.0, 1.0, -2.0), torch.tensor([0, 0, -1, 0, 1, 1, 2])
    loss, stats = loss_of(config_of("gspo"), policy, engine, a, sequence_ids=ids)
    counted = ids >= 0
    of_each = torch.autograd.grad((loss * counted)[counted].sum(), policy)[0]
    want = torch.zeros_like(of_each)
    for document, size in ((0, 3), (2, 1)):
        tokens = ids == document
        objective = -a[tokens][0] * (policy - engine)[tokens].mean().exp()
        # The mean over a document's tokens of l_pg is the objective of the paper.
        want += size * torch.autograd.grad(objective, policy)[0]
    torch.testing.assert_close(of_each, want)
    assert stats.kept[counted].tolist() == [True, True, True, False, False, True]
    torch.testing.assert_close(loss[4:6].detach(), tensor(-1 - 4e-4, -1 - 4e-4))


# Bad input.


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"policy": {"kind": "gspo"}}, "gspo needs sequence_ids, got None"),
        ({"guard": {"kind": "shrink"}}, "guard shrink needs a noise table, got None"),
        ({"guard": {"kind": "derived"}}, "guard derived needs a noise table, got None"),
        ({"proximal": {}}, "needs proximal_logp, got None"),
    ],
)
def test_what_a_config_needs_and_lacks_is_named(config: dict[str, Any], says: str) -> None:
    one = tensor(-1.0)
    with pytest.raises(ValueError, match=says):
        policy_loss(one, one, one, config=LossConfig.model_validate(config))


def test_bad_arguments_are_refused_with_their_value() -> None:
    one, two = tensor(-1.0), tensor(-1.0, -1.0)
    with pytest.raises(ValueError, match=r"delta must not be negative, got -0\.1"):
        dppo_kl_mask(one, one, one, delta=-0.1)
    with pytest.raises(ValueError, match=r"advantages must be aligned with policy_logp \[1\], got \[2\]"):
        dppo_kl_mask(one, one, two)
    with pytest.raises(ValueError, match=r"proximal_logp must be aligned with policy_logp \[1\], got \[2\]"):
        policy_loss(one, one, one, config=config_of("btv", proximal={}), proximal_logp=two)
    with pytest.raises(ValueError, match=r"sequence_ids must be integers, got torch\.float64"):
        policy_loss(one, one, one, config=config_of("gspo"), sequence_ids=one)
    with pytest.raises(ValueError, match=r"sequence_ids must be aligned with values \[1\], got \[2\]"):
        policy_loss(one, one, one, config=config_of("gspo"), sequence_ids=two.long())


def test_gspo_takes_its_mean_over_tokens_whose_engine_log_prob_is_known() -> None:
    policy, engine = tensor(-1.0, -1.0, -1.0), tensor(-1.4, math.nan, -math.inf)
    config = config_of("gspo", policy={"kind": "gspo", "eps_low": 0.9, "eps_high": 9.0})
    _, stats = policy_loss(
        policy, engine, tensor(1, 1, 1), config=config, sequence_ids=torch.zeros(3, dtype=torch.long)
    )
    assert stats.weight.tolist() == pytest.approx([math.exp(0.4), 0.0, 0.0])
