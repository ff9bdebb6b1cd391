"""What of the objective a checkpoint holds: the coefficient that adapts and the last calibration."""

import pytest

from megatron_rl.config import ConfigError
from megatron_rl.loss.config import KlConfig, LossConfig
from megatron_rl.loss.snr import NoiseTable
from megatron_rl.telemetry.values import Last, Mean
from megatron_rl.trainer.objective import RunningObjective

TABLE = NoiseTable(shrink=(0.1, 0.9), lower=(-0.25, -1.0), upper=(0.5, 2.0), edges=(0.0, 0.3, 1.0))


def test_without_a_kl_term_there_is_no_coefficient_and_without_a_calibration_no_table() -> None:
    objective = RunningObjective(LossConfig(), None)
    assert objective.kl_coef is None and objective.noise is None
    assert objective.after_step({}) == {}


def test_a_coefficient_without_target_stays_and_is_that_of_the_config_after_a_resume() -> None:
    objective = RunningObjective(LossConfig(kl=KlConfig(coef=0.5)), None)
    assert objective.after_step({"kl/reference_k3": Mean(9.0, 1.0)}) == {"kl/coef": Last(0.5)}
    assert objective.kl_coef == 0.5
    assert RunningObjective(LossConfig(kl=KlConfig(coef=0.25)), objective.state()).kl_coef == 0.25


def test_an_adaptive_coefficient_follows_the_measured_kl_and_goes_on_after_a_resume() -> None:
    config = LossConfig(kl=KlConfig(coef=0.5, target=0.1))
    objective = RunningObjective(config, None)
    assert objective.after_step({"kl/reference_k3": Mean(4.0, 10.0)}) == {"kl/coef": Last(0.5)}, "the one that was used"
    assert objective.kl_coef == pytest.approx(0.5 * 1.02)
    assert RunningObjective(config, objective.state()).kl_coef == pytest.approx(0.5 * 1.02)
    objective.after_step({"kl/reference_k3": Mean(0.0, 0.0)})
    assert objective.kl_coef == pytest.approx(0.5 * 1.02), "no tokens, no change"


def test_a_start_of_the_adaptive_coefficient_that_a_resume_would_not_read_is_refused() -> None:
    state = RunningObjective(LossConfig(kl=KlConfig(coef=0.5, target=0.1)), None).state()
    with pytest.raises(ConfigError, match=r"loss\.kl\.coef .* got 0\.25 where it started from 0\.5 and is 0\.5 now"):
        RunningObjective(LossConfig(kl=KlConfig(coef=0.25, target=0.1)), state)
    assert RunningObjective(LossConfig(kl=KlConfig(coef=0.25)), state).kl_coef == 0.25
    fixed = RunningObjective(LossConfig(kl=KlConfig(coef=0.5)), None).state()
    assert RunningObjective(LossConfig(kl=KlConfig(coef=0.25, target=0.1)), fixed).kl_coef == 0.25


def test_the_last_calibration_is_the_same_after_a_resume() -> None:
    objective = RunningObjective(LossConfig(), None)
    objective.noise = TABLE
    assert RunningObjective(LossConfig(), objective.state()).noise == TABLE
