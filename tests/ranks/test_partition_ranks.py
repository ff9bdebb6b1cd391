"""A step's gradient belongs to its documents, not to how they are cut over ranks, microbatches and positions."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Cuts = dict[str, dict[str, Any]]
OBJECTIVES = ["of_tokens", "of_sequences", "decoupled"]
CUTS = [f"dp2/{cut}" for cut in ("one", "halves", "alone", "backwards", "packed")]
CUTS += [f"{layout}/{cut}" for layout in ("tp2", "pp2", "cp2") for cut in ("one", "packed")]


@pytest.fixture(scope="module")
def cuts(model_folder: Path, tmp_path_factory: pytest.TempPathFactory, run_script: Callable[..., None]) -> Cuts:
    """What check_partition.py measured: {"<objective>/<layout>/<cut>": differences to all documents on one rank}."""
    work = tmp_path_factory.mktemp("partition")
    run_script("check_partition.py", 2, model_folder / "plain", work)
    return json.loads((work / "partition.json").read_text())


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("cut", CUTS)
def test_gradient_does_not_depend_on_how_documents_are_split_over_ranks_microbatches_and_positions(
    cuts: Cuts, cut: str, objective: str
) -> None:
    """With tokens that are masked, distilled, or without engine log-prob."""
    got = cuts[f"{objective}/{cut}"]
    assert got["whole"] < 1e-6
    assert got["worst_tensor"] < 3e-6
    assert abs(got["grad_norm"]) < 1e-6


@pytest.mark.parametrize("stream", ["logp", "entropy"])
@pytest.mark.parametrize("cut", CUTS)
def test_gradient_of_log_probs_and_of_entropies_alone_does_not_depend_on_the_layout(
    cuts: Cuts, cut: str, stream: str
) -> None:
    """Near uniform distributions have entropies with small slopes, so float32 sums in another order weigh more."""
    got = cuts[f"{stream}/{cut}"]
    assert got["whole"] < 2e-6
    assert got["worst_tensor"] < 6e-6


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_metrics_of_a_step_do_not_depend_on_the_cut_either(cuts: Cuts, objective: str) -> None:
    expected = cuts[f"{objective}/dp2/one"]["metrics"]
    for cut in CUTS:
        assert cuts[f"{objective}/{cut}"]["metrics"] == pytest.approx(expected, rel=1e-5, abs=1e-6), cut


def test_the_steps_hold_every_kind_of_token(cuts: Cuts) -> None:
    metrics = cuts["of_tokens/dp2/one"]["metrics"]
    for name in ("tokens/missing_logp", "tokens/distilled", "mask/share", "gradient_scale/share_scaled"):
        assert metrics[name] > 0, name
    assert metrics["tokens/trained"] < 200 and 0 < metrics["mask/share"] < 1
    assert 0 < cuts["of_sequences/dp2/one"]["metrics"]["mask/share"] < 1
    assert 0 < cuts["decoupled/dp2/one"]["metrics"]["guard/share"] < 1
