"""A frozen reference beside a policy that is trained: scores bit by bit, and a policy that notices nothing."""

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

make_hf_model = runpy.run_path(str(Path(__file__).parents[1] / "hf_models.py"))["make_hf_model"]
CASES = ["dp2", "dp2_bf16", "tp2_ep2_glm", "pp2_tied"]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, run_script: Callable[..., None]) -> list[dict[str, Any]]:
    """What check_reference.py recorded on each of two ranks: {case: record}."""
    models, work = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("reference")
    for seed, name in enumerate(["plain", "tied", "glm"]):
        make_hf_model(models / name, name, seed)
        make_hf_model(models / f"{name}_other", name, seed + 10)
    run_script("check_reference.py", 2, models, work)
    return [json.loads((work / f"reference{rank}.json").read_text()) for rank in range(2)]


def holds(ranks: list[dict[str, Any]], case: str, *facts: str) -> None:
    """On both ranks."""
    assert [[rank[case][fact] for fact in facts] for rank in ranks] == [[True] * len(facts)] * 2


@pytest.mark.parametrize("case", CASES)
def test_the_reference_scores_as_the_policy_did_at_the_start_whatever_the_policy_has_become(
    ranks: list[dict[str, Any]], case: str
) -> None:
    holds(ranks, case, "at_start", "after_step_1", "after_step_2", "after_step_3", "policy_has_moved")


@pytest.mark.parametrize("case", CASES)
def test_many_batches_fill_the_pipeline_once_and_score_as_each_does_alone(
    ranks: list[dict[str, Any]], case: str
) -> None:
    """Bit by bit, of different lengths, with at most one broadcast."""
    holds(ranks, case, "in_one_pass", "filled_once", "none_of_none")


@pytest.mark.parametrize("case", CASES)
def test_scoring_changes_no_byte_of_weights_gradients_moments_and_next_steps(
    ranks: list[dict[str, Any]], case: str
) -> None:
    """Between steps, and between a backward and its update; also where the forward raises."""
    holds(ranks, case, "training_is_unaffected", "restored_after_an_exception")


@pytest.mark.parametrize("case", CASES)
def test_a_reference_of_another_folder_has_its_weights_and_expert_bias(ranks: list[dict[str, Any]], case: str) -> None:
    holds(ranks, case, "other_weights", "loading_changes_nothing")


@pytest.mark.parametrize("case", CASES)
def test_a_reset_makes_the_policy_of_that_step_the_reference(ranks: list[dict[str, Any]], case: str) -> None:
    holds(ranks, case, "reset_is_the_policy", "saved_as_it_is", "and_stays_it")


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_has_the_reference_of_its_step_and_forgets_later_ones(
    ranks: list[dict[str, Any]], case: str
) -> None:
    holds(ranks, case, *(f"resumed_at_{step}" for step in (7, 3, 2, 0)))
    left = [ranks[0][case][f"folders_at_{step}"] for step in (7, 3, 2, 0)]
    assert left == [["step_000001", "step_000003"], ["step_000001", "step_000003"], ["step_000001"], []]


@pytest.mark.parametrize("case", CASES)
def test_a_reset_optimizer_starts_over_from_the_same_weights(ranks: list[dict[str, Any]], case: str) -> None:
    """The step after it is the first step of a new optimizer, bit by bit; master weights stay."""
    holds(ranks, case, "before_the_first_step", "weights_stay", "no_step_done", "one_step_done", "as_a_new_optimizer")
    holds(ranks, case, "differs_from_going_on")
