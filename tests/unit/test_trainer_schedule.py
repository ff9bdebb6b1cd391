"""Learning-rate schedules against closed forms, and options that would have no effect."""

import itertools
import math

import pytest
from pydantic import ValidationError

from megatron_rl.trainer.config import OptimizerConfig
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


def test_a_final_fraction_without_a_decay_is_refused() -> None:
    with pytest.raises(ValidationError, match="no effect with schedule constant"):
        OptimizerConfig(schedule="constant", final_lr_fraction=0.1)
