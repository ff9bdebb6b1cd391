"""Objectives that do not fit the run around them: one line at the start that gives rule, value and cure."""

import runpy
from collections.abc import Callable
from pathlib import Path

import pytest

rl = runpy.run_path(str(Path(__file__).parents[1] / "cli_input.py"))["rl"]

OBJECTIVES = {
    "kl without reference": ("loss.kl.coef=0.1", "loss.kl needs a reference", "trainer.reference={}"),
    "kl in the reward without reference": ("loss.kl.placement=reward", "loss.kl needs a reference", "got trainer"),
    "derived without calibration": (
        "trainer.snr=null loss.policy.kind=none loss.guard.kind=derived",
        "loss.guard.kind derived reads what calibrations measure",
        "choose clamp",
    ),
    "shrunk engine ratio without calibration": (
        "trainer.snr=null weight_sync.every_steps=2 loss.proximal.guard.kind=shrink",
        "loss.proximal.guard.kind shrink reads",
        "trainer.snr={}",
    ),
    "movement guarded by its noise": (
        "weight_sync.every_steps=2 loss.proximal={} loss.guard.kind=derived",
        "loss.guard.kind derived cannot be used with loss.proximal",
        "set loss.proximal.guard",
    ),
    "proximal policy that is the policy": (
        "loss.proximal={}",
        "loss.proximal has no effect with weight_sync.every_steps 1",
        "raise it",
    ),
    "updates that are made anyway": (
        "weight_sync.every_steps=4 trainer.snr.every_steps=1",
        "weight_sync.every_steps has no effect with trainer.snr.every_steps 1",
        "got 4",
    ),
    "observations in single turns": (
        "loss.entropy.coef=0.1 loss.entropy.tokens=after_observation",
        "after_observation has no effect with rollout.max_turns 1",
        "choose all",
    ),
    "regulariser of weight 0": ("loss.tau=0 loss.regulariser_tokens=kept", "regulariser_tokens has no effect", "tau 0"),
    "offload without a device": ("trainer.reference.offload=true", "offload has no effect on platform cpu", "remove"),
    "reference that is not there": ("trainer.reference.path=nowhere", "trainer.reference.path", "nowhere"),
    "guard on a guarded ratio": ("loss.policy.kind=tis loss.guard.kind=clamp", "loss", "guard has no effect"),
    "reward with an estimator": ("loss.kl.placement=reward loss.kl.kind=k3+", "loss.kl", "kind must be k1"),
    "length of another reduction": ("loss.fixed_length=8", "fixed_length must be set for", "token_mean"),
    "unknown kind": ("loss.policy.kind=ppo", "ppo", "ppo_clip"),
    "option of another kind": ("loss.policy.kind=tis loss.policy.eps_low=.1", "loss.policy", "eps_low"),
    "negative eps": ("loss.policy.eps_low=-1", "loss.policy", "eps_low"),
    "bound of 0": ("loss.g_max=0", "loss.g_max", "greater than 0"),
    "pass@k of fewer attempts": ("orchestrator.evaluation.pass_at=[1,4]", "pass_at", "attempts_per_prompt"),
}


@pytest.mark.parametrize("case", OBJECTIVES)
def test_an_objective_that_does_not_fit_is_refused(
    case: str, tiny: Path, tmp_path: Path, error_of: Callable[..., str]
) -> None:
    overrides, *words = OBJECTIVES[case]
    error = error_of("rl", rl(tiny, tmp_path), *overrides.split())
    assert all(word in error for word in words), error
    assert error.count("\n") == 1, "one line"
    assert not (tmp_path / "run").exists(), "a refused run leaves nothing"
    if case != "reference that is not there":  # it may be on another machine
        assert error_of("rl", rl(tiny, tmp_path), "--dry-run", *overrides.split()) == error, "a dry run finds the same"
