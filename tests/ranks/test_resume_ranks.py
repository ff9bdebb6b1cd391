"""A run that stops and resumes in a new process is the run that never stopped, bit by bit."""

from typing import Any

import pytest

Runs = dict[str, dict[str, Any]]
LAYOUTS = ["single", "single_bf16", "dp2", "ep2", "tp2"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_resumed_weights_losses_and_random_draws_are_bitwise_equal(training_runs: Runs, layout: str) -> None:
    straight, resumed = training_runs["straight"][layout], training_runs["resumed"][layout]
    assert resumed["losses_and_draws"] == straight["losses_and_draws"]
    assert resumed["weights"] == straight["weights"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_step_and_extra_state_come_back_and_old_checkpoints_go(training_runs: Runs, layout: str) -> None:
    resumed = training_runs["resumed"][layout]
    assert (resumed["step"], resumed["extra"]) == (2, "\x00state")
    assert resumed["folders"] == ["step_000002"], "keep_last is 1"


@pytest.mark.parametrize(("written", "read"), [("ep2", "ep2_as_dp2"), ("tp2", "tp2_as_tp2_ep2")])
def test_another_layout_goes_on_from_the_same_weights_and_moments(training_runs: Runs, written: str, read: str) -> None:
    """The same batches, other shards: the same losses up to rounding; the second needs the optimizer's moments too."""
    losses, _ = training_runs["straight"][written]["losses_and_draws"][0]
    assert training_runs["resumed"][read] == pytest.approx(losses, rel=1e-6)


def test_checkpoint_of_another_model_is_refused_with_what_differs(training_runs: Runs) -> None:
    message = training_runs["resumed"]["another_model"]
    assert "tensors" in message and "model.path" in message


def test_a_save_killed_half_way_leaves_the_previous_checkpoint_latest(training_runs: Runs) -> None:
    assert training_runs["resumed"]["after_kill"] == "step_000001"
