"""Objectives that do not fit the run around them: one line at the start that gives rule, value and cure."""

import runpy
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_rl.loss.config import KlConfig, LossConfig
from megatron_rl.trainer.objective import RunningObjective

CLI = runpy.run_path(str(Path(__file__).parents[1] / "cli_input.py"))
rl = CLI["rl"]

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
    "shrunk by what is measured too late": (
        "loss.guard.kind=shrink trainer.snr.every_steps=100",
        "loss.guard.kind shrink has no effect with trainer.snr.every_steps=100",
        "100 steps",
    ),
    "calibrations switched off as a flag": ("trainer.snr=false", "trainer.snr must be", "null switches it off"),
    "change of probability above 1": ("loss.policy.eps_high=1.28", "loss.policy.eps_high", "less than or equal to 1"),
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
    "reset after the last step": (
        "trainer.reference.reset_every_steps=100",
        "trainer.reference.reset_every_steps has no effect in a run of 100 steps, got 100",
        "lower it",
    ),
    "plateau longer than the run": (
        "trainer.reference.reset_after_plateau=5",
        "trainer.reference.reset_after_plateau has no effect where only 4 evaluations",
        "got 5",
    ),
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


def test_a_start_of_the_coefficient_that_a_resumed_run_would_not_read_is_refused(
    tiny: Path, tmp_path: Path, error_of: Callable[..., str]
) -> None:
    extra = CLI["write_checkpoint"](tmp_path / "run", tiny / "model", step=5) / "extra"
    extra.mkdir()
    began = LossConfig(kl=KlConfig(coef=0.5, target=0.1))
    (extra / "objective").write_bytes(RunningObjective(began, None).state())
    overrides = ["trainer.reference={}", "loss.kl={coef: 0.25, target: 0.1}"]
    for flags in ([], ["--dry-run"]):
        assert "loss.kl.coef is where" in error_of("rl", rl(tiny, tmp_path), *flags, *overrides)


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
