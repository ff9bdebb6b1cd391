"""The optimizer's update against AdamW written out in float64."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def errors(
    model_folder: Path, tmp_path_factory: pytest.TempPathFactory, run_script: Callable[..., None]
) -> dict[str, dict[str, float]]:
    """What check_optimizer.py measured: {case: {kind of parameter: largest error in units of the learning rate}}."""
    work = tmp_path_factory.mktemp("optimizer")
    run_script("check_optimizer.py", 1, model_folder / "plain", work)
    return json.loads((work / "errors.json").read_text())


@pytest.mark.parametrize("kind", ["matrices", "vectors"])
def test_update_is_adamw_that_decays_matrices_and_exempts_norm_gains(
    errors: dict[str, dict[str, float]], kind: str
) -> None:
    assert errors["straight"][kind] < 1e-4


@pytest.mark.parametrize("kind", ["matrices", "vectors"])
def test_a_resumed_run_steps_with_the_settings_of_its_run_file(errors: dict[str, dict[str, float]], kind: str) -> None:
    """Moments and step count come from the checkpoint; decay, betas and eps do not."""
    assert errors["resumed with other settings"][kind] < 1e-4
