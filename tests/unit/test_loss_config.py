"""Settings of the objective: each policy loss and guard has its own, and what has no effect is refused."""

from typing import Any

import pytest
from pydantic import ValidationError

from megatron_rl.config import ConfigModel
from megatron_rl.config.load import dump_config, load_config
from megatron_rl.loss.config import LossConfig
from megatron_rl.loss.formula import objective_formula
from megatron_rl.loss.guard import GUARD_KINDS
from megatron_rl.loss.trust_region import POLICY_LOSSES


class Run(ConfigModel):
    """A run file with nothing but its objective."""

    loss: LossConfig = LossConfig()
    """The objective."""


def error_of(**options: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        LossConfig.model_validate(options)
    return str(caught.value)


def test_the_default_objective_is_that_of_the_report() -> None:
    config = LossConfig()
    assert config.policy.kind == "btv" and config.g_max == 2.0 and config.tau == 1e-3
    assert config.guard.kind == "off" and config.reduction == "token_mean"
    assert config.proximal is config.kl is config.entropy is None


@pytest.mark.parametrize("kind", list(POLICY_LOSSES))
def test_every_policy_loss_can_be_named(kind: str) -> None:
    assert LossConfig.model_validate({"policy": {"kind": kind}}).policy.kind == kind


@pytest.mark.parametrize("kind", GUARD_KINDS)
def test_every_guard_can_be_named_on_either_ratio(kind: str) -> None:
    config = LossConfig.model_validate({"guard": {"kind": kind}, "proximal": {"guard": {"kind": kind}}})
    assert config.proximal is not None
    assert config.guard.kind == config.proximal.guard.kind == kind


def test_a_policy_without_a_kind_is_of_the_default_kind() -> None:
    assert LossConfig.model_validate({"policy": {"eps_high": 0.3}}).policy.model_dump()["eps_high"] == 0.3


def test_a_file_may_say_off_without_quotes(tmp_path: Any) -> None:
    """YAML reads it as false; the dump quotes it."""
    path = tmp_path / "run.yaml"
    path.write_text("loss:\n  guard: {kind: off}\n  proximal: {guard: {kind: clamp, low: 0.7, high: 6}}\n")
    config = load_config(path, Run, ["loss.kl.target=0.1", "loss.policy.kind=dppo_kl"])
    assert config.loss.guard.kind == "off" and config.loss.kl is not None and config.loss.kl.target == 0.1
    path.write_text(dump_config(config))
    assert load_config(path, Run) == config


@pytest.mark.parametrize(
    ("options", "says"),
    [
        *(
            ({"policy": {"kind": k}, "guard": {"kind": "clamp"}}, f"no effect of its own with policy.kind {k}")
            for k in ("ppo_clip", "cispo", "gspo", "tis", "reject")
        ),
        *(
            ({"policy": {"kind": k}, "regulariser_tokens": "kept"}, f"kept has no effect with policy.kind {k}")
            for k in ("cispo", "tis", "none")
        ),
        ({"fixed_length": 8}, "fixed_length must be set for reduction fixed_length and only there, got 8"),
        ({"reduction": "fixed_length"}, "fixed_length must be set for reduction fixed_length and only there, got None"),
        ({"kl": {"placement": "reward", "kind": "k3+"}}, r"kind must be k1 with placement reward.*, got k3\+"),
        ({"kl": {"placement": "reward", "sequence_exact": True}}, "sequence_exact has no effect with placement reward"),
        ({"kl": {"kind": "k3", "sequence_exact": True}}, "sequence_exact needs a kind with the gradient of k2"),
        ({"kl": {"kind": "k4"}}, "'k4'"),
        ({"kl": {"coef": 0}}, "greater than 0"),
        ({"kl": {"target": -1}}, "greater than 0"),
        ({"entropy": {"coef": 0}}, "greater than 0"),
        ({"g_max": 0}, "greater than 0"),
        ({"tau": -1}, "greater than or equal to 0"),
        ({"policy": {"eps_low": -0.1}}, "greater than or equal to 0"),
        ({"policy": {"kind": "ppo_clip", "dual_clip": 1.0}}, "greater than 1"),
        ({"policy": {"kind": "ppo_clip", "eps_low": 1.5}}, "less than or equal to 1"),
        ({"policy": {"kind": "reject", "low": 1.5}}, "less than or equal to 1"),
        ({"guard": {"kind": "clamp", "high": 0.5}}, "greater than or equal to 1"),
        ({"policy": {"kind": "tis", "eps_low": 0.2}}, "Extra inputs"),
        ({"policy": {"kind": "ppo"}}, "does not match any of the expected tags"),
        ({"reduction": "mean"}, "'token_mean', 'sequence_mean' or 'fixed_length'"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        LossConfig.model_validate(options)


def test_the_regulariser_may_keep_to_pushed_tokens_where_something_stops_a_push() -> None:
    for options in ({}, {"policy": {"kind": "none"}, "guard": {"kind": "reject"}}, {"policy": {"kind": "gspo"}}):
        LossConfig.model_validate({"regulariser_tokens": "kept", **options})
    behind = {"policy": {"kind": "tis"}, "proximal": {"guard": {"kind": "clip"}}}
    LossConfig.model_validate({"regulariser_tokens": "kept", **behind})


def test_the_kl_of_the_reward_is_k1() -> None:
    config = LossConfig.model_validate({"kl": {"placement": "reward"}})
    assert config.kl is not None and config.kl.kind == "k1"


def formula(*, has_reference: bool = False, **options: Any) -> str:
    return objective_formula(LossConfig.model_validate(options), has_reference=has_reference)


def test_the_formula_of_the_default_objective() -> None:
    assert formula().splitlines() == [
        "loss = sum over trained tokens of (c l_pg + 0.001 (log p/p_engine)^2) / trained tokens of the step",
        "  l_pg (btv) = -k A r, r = p/p_engine; k = 0 once p - p_engine > 0.2 (A > 0) or < -0.2 (A <= 0)",
        "  c = min(1, 2 / (weight (1 - p))): no entry of a token's gradient on logits / temperature is above 2 |A|",
        "  (log p/p_engine)^2 over all trained tokens; its push is not bounded",
    ]


def test_the_formula_names_every_term_and_the_gradient_it_has() -> None:
    text = formula(
        policy={"kind": "ppo_clip"},
        g_max=None,
        proximal={"guard": {"kind": "derived"}},
        tau=0,
        kl={"kind": "k3", "target": 0.05},
        entropy={"coef": 0.01, "tokens": "after_observation"},
        reduction="fixed_length",
        fixed_length=512,
    )
    assert text.splitlines() == [
        "loss = sum over trained tokens of (c l_pg + beta KL - 0.01 H) / (512 * rollouts of the step)",
        "  l_pg (ppo_clip) = -A r, r = p/p_proximal; no push once r > 1.28 (A > 0), r < 0.8 (A <= 0) or r > 3 (A <= 0)",
        "  l_pg is multiplied by the constant p_proximal/p_engine",
        "  p_proximal/p_engine is clamped to its bin's derived bounds, from the last calibration (guard derived)",
        "  c = 1: no bound on a token's gradient on the logits",
        "  KL (k3) descends KL(reference || policy), token by token, prefixes held",
        "  beta starts at 0.001, steered to a KL of 0.05 per token",
        "  H: entropy over the whole vocabulary at the first token after an observation, pulls towards the uniform "
        "distribution",
    ]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        *(({"policy": {"kind": kind}}, f"l_pg ({kind}) = ") for kind in POLICY_LOSSES),
        *(({"guard": {"kind": kind}}, f"(guard {kind})") for kind in GUARD_KINDS[1:]),
        ({"policy": {"sided": "symmetric"}}, "above 0.2 or below -0.2, whatever A"),
        ({"policy": {"kind": "reject"}}, "warning: rejecting by r deletes mostly tokens where the policy decides"),
        ({"guard": {"kind": "reject"}}, "warning: rejecting by p/p_engine deletes"),
        ({"kl": {}}, "KL (k3+) descends KL(policy || reference), token by token"),
        ({"kl": {"kind": "k1"}}, "KL (k1) pushes nowhere on average"),
        ({"kl": {"sequence_exact": True}}, "descends KL(policy || reference) of whole sequences"),
        ({"kl": {"placement": "reward", "coef": 0.3}}, "reward of a rollout - 0.3 * sum of k1"),
        ({"reduction": "sequence_mean"}, "1/(tokens of the rollout) * (c l_pg"),
        ({"regulariser_tokens": "kept"}, "over the tokens that are pushed"),
    ],
)
def test_the_formula_says_what_an_option_does(options: dict[str, Any], says: str) -> None:
    assert says in formula(**options)
    assert says not in formula() or options == {"policy": {"kind": "btv"}}


def test_a_reference_without_a_term_is_said_to_be_measured() -> None:
    assert "measured" in formula(has_reference=True) and "measured" not in formula()
    assert "measured" not in formula(has_reference=True, kl={})
