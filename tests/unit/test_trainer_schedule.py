"""Learning-rate schedules against closed forms, and options that would have no effect."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from megatron_rl.trainer.config import OptimizerConfig, TrainerConfig
from megatron_rl.trainer.schedule import learning_rate


def rates(total_steps: int, **options: object) -> list[float]:
    config = OptimizerConfig(lr=1.0, **options)  # type: ignore[arg-type]
    return [learning_rate(config, step=step, total_steps=total_steps) for step in range(total_steps)]


def test_warm_up_is_linear_and_reaches_the_peak_at_its_last_step() -> None:
    assert rates(10, warmup_steps=4)[:4] == [0.25, 0.5, 0.75, 1.0]


def test_linear_and_cosine_start_at_the_peak_and_end_at_the_final_fraction_on_the_last_step() -> None:
    for schedule in ("linear", "cosine"):
        values = rates(21, schedule=schedule, warmup_steps=4, final_lr_fraction=0.2)
        assert values[4] == pytest.approx(1.0) and values[-1] == pytest.approx(0.2)
        assert all(a > b for a, b in itertools.pairwise(values[4:]))
    middle = rates(21, schedule="cosine", final_lr_fraction=0.2)[5]
    assert middle == pytest.approx(0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi * 0.25)))


@given(
    warmup=st.integers(0, 20), stable=st.integers(0, 20), decay=st.integers(1, 20), final=st.floats(0.0, 1.0, width=32)
)
def test_wsd_is_the_least_of_warm_up_peak_and_the_line_down_to_the_last_step(
    warmup: int, stable: int, decay: int, final: float
) -> None:
    total = warmup + stable + decay
    values = rates(total, schedule="wsd", warmup_steps=warmup, decay_steps=decay, final_lr_fraction=final)
    for step, value in enumerate(values):
        rising = (step + 1) / warmup if step < warmup else 1.0
        falling = 1.0 - (1.0 - final) * (step - (total - decay - 1)) / decay
        exact = rising if step < total - decay else falling
        assert value == pytest.approx(exact, rel=1e-12, abs=1e-15)
    assert values[-1] == pytest.approx(final, abs=1e-15)
    assert all(value == 1.0 for value in values[max(0, warmup - 1) : total - decay])


def test_wsd_decays_over_the_last_tenth_unless_told_otherwise() -> None:
    assert rates(100, schedule="wsd", warmup_steps=5) == rates(100, schedule="wsd", warmup_steps=5, decay_steps=10)
    assert rates(5, schedule="wsd", final_lr_fraction=0.0) == [1.0, 1.0, 1.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("warmup", "decay", "steps", "fits"), [(4, 6, 10, True), (4, 7, 10, False), (10, None, 10, False)]
)
def test_warm_up_and_decay_must_fit_into_the_run(warmup: int, decay: int | None, steps: int, fits: bool) -> None:
    optimizer = OptimizerConfig(schedule="wsd", warmup_steps=warmup, decay_steps=decay)
    if fits:
        TrainerConfig(steps=steps, optimizer=optimizer)
        return
    with pytest.raises(ValidationError, match="must be at most steps"):
        TrainerConfig(steps=steps, optimizer=optimizer)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_decay_steps_of_another_schedule_are_refused(schedule: str) -> None:
    with pytest.raises(ValidationError, match=f"no effect with schedule {schedule}"):
        OptimizerConfig(schedule=schedule, decay_steps=3)  # type: ignore[arg-type]


def test_a_bound_that_skips_every_clipped_step_is_refused() -> None:
    OptimizerConfig(clip_grad=1.0, skip_above_norm=1.5)
    with pytest.raises(ValidationError, match="must be above clip_grad"):
        OptimizerConfig(clip_grad=1.0, skip_above_norm=1.0)


def test_a_final_fraction_without_a_decay_is_refused() -> None:
    with pytest.raises(ValidationError, match="no effect with schedule constant"):
        OptimizerConfig(schedule="constant", final_lr_fraction=0.1)
