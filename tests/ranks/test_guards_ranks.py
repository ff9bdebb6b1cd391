"""A step is applied on every rank or on none, and a refusal names step, rank, samples or parameters."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ATTENTION = "model.layers.1.self_attn.o_proj.weight"


@pytest.fixture(scope="module")
def ranks(
    model_folder: Path, tmp_path_factory: pytest.TempPathFactory, run_script: Callable[..., None]
) -> list[dict[str, Any]]:
    """What check_guards.py recorded on each of two ranks: {layout: {case: record}}."""
    work = tmp_path_factory.mktemp("guards")
    run_script("check_guards.py", 2, model_folder / "plain", work)
    return [json.loads((work / f"guards{rank}.json").read_text()) for rank in range(2)]


def refused(ranks: list[dict[str, Any]], layout: str, case: str) -> str:
    """The message, equal on both ranks, of a step that changed nothing on either."""
    records = [rank[layout][case] for rank in ranks]
    assert records[0]["said"] == records[1]["said"]
    assert all(record["unchanged"] for record in records)
    assert records[0]["said"].startswith("step 7: ")
    return records[0]["said"]


@pytest.mark.parametrize("layout", ["dp2", "ep2", "tp2", "pp2"])
def test_a_finite_step_is_applied_on_every_rank_with_one_norm(ranks: list[dict[str, Any]], layout: str) -> None:
    records = [rank[layout]["good"] for rank in ranks]
    assert not any(record["said"] or record["unchanged"] for record in records)
    assert records[0]["grad_norm"] == records[1]["grad_norm"] > 0
    assert "optimizer/skipped" not in records[0]["metrics"]


def test_a_broken_gradient_of_one_rank_stops_all_with_its_parameters_and_the_number_of_bad_values(
    ranks: list[dict[str, Any]],
) -> None:
    said = refused(ranks, "dp2", "gradient")
    assert "rank 1: gradient of parameters " in said and "rank 0" not in said
    assert f"{ATTENTION} (3 of {64 * 128} values)" in said
    assert f"model.layers.1.mlp.experts.0.down_proj.weight (1 of {64 * 48} values)" in said
    assert "No weight was changed" in said


@pytest.mark.parametrize(
    ("layout", "name"),
    [("ep2", "model.layers.1.mlp.experts.4.down_proj.weight"), ("tp2", ATTENTION), ("pp2", ATTENTION)],
)
def test_parameters_have_hugging_face_names_whatever_the_layout(
    ranks: list[dict[str, Any]], layout: str, name: str
) -> None:
    """The first local expert of rank 1 is the model's fifth; the first layer of the second stage is its second."""
    said = refused(ranks, layout, "gradient")
    assert f"rank 1: gradient of parameter {name} (1 of " in said


def test_a_broken_activation_is_told_by_its_samples(ranks: list[dict[str, Any]]) -> None:
    said = refused(ranks, "dp2", "activation")
    assert "rank 1, microbatch 0 (samples sample1-0-0, sample1-0-1): policy_logp of trained tokens must be" in said
    assert "rank 1, microbatch 1" in said and "rank 0" not in said


def test_a_loss_that_is_not_finite_is_told_by_rank_and_microbatch(ranks: list[dict[str, Any]]) -> None:
    said = refused(ranks, "dp2", "loss")
    assert "got rank 0, microbatch 1 (samples sample0-1-0, sample0-1-1): loss inf. " in said
    assert "rank 1" not in said


def test_finite_gradients_whose_sum_over_ranks_overflows_are_named(ranks: list[dict[str, Any]]) -> None:
    said = refused(ranks, "dp2", "overflow")
    assert "after the sum over ranks" in said and "model.norm.weight (" in said


def test_an_overflow_of_the_norm_alone_is_not_blamed_on_a_parameter(ranks: list[dict[str, Any]]) -> None:
    assert "squares overflow" in refused(ranks, "dp2", "squares")


def test_steps_above_the_bound_are_skipped_and_the_tenth_in_a_row_ends_the_run(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        skipped = [rank["dp2"][f"skip{number}"] for number in range(10)]
        assert all(record["unchanged"] for record in skipped)
        assert [record["metrics"].get("optimizer/skipped") for record in skipped] == [1.0] * 9 + [None]
        assert "skip_above_norm=1e-06" in skipped[-1]["said"]
        assert rank["dp2"]["not_skipped"]["metrics"]["optimizer/skipped"] == 0.0
        assert not rank["dp2"]["not_skipped"]["unchanged"]


def test_every_step_measures_the_ranks_times(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        metrics = rank["dp2"]["good"]["metrics"]
        assert 0 < metrics["perf/rank_s_median"] <= metrics["perf/rank_s_max"]
        assert metrics["perf/slowest_rank"] in (0, 1)
