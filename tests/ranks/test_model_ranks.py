"""The model under every parallel layout against Hugging Face's own implementation, in float32."""

import re
from typing import Any

import pytest

LAYOUTS = [
    "single",
    "five_microbatches",
    "selective_recompute",
    "full_recompute",
    "dp2",
    "ep2",
    "tp2",
    "tp2_ep2_etp1",
    "tp2_etp2",
    "pp2",
    "cp2",
    "pp2_full_recompute",
    "tp2_ep2_selective_recompute",
]
ON_FOUR_RANKS = ["tp2_ep2_dp2", "ep2_etp2_dp4", "tp2_pp2", "tp2_cp2_ep2", "pp2_ep2_dp2"]
TIED_LAYOUTS = ["single", "tp2", "pp2", "cp2", "tp2_pp2", "pp2_ep2_dp2"]


def cases(layouts: list[str]) -> list[str]:
    """layout/model for each model that a layout is measured with."""
    return [
        f"{layout}/{model}"
        for model in ("plain", "glm", "tied")
        for layout in layouts
        if model != "tied" or layout in TIED_LAYOUTS
    ]


@pytest.fixture(params=[*cases(LAYOUTS), *(pytest.param(c, marks=pytest.mark.slow) for c in cases(ON_FOUR_RANKS))])
def result(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Measurements of one layout and model."""
    on_four = request.param.split("/")[0] in ON_FOUR_RANKS
    return request.getfixturevalue("measured_on_four" if on_four else "measured")[request.param]


def test_logits_of_a_packed_batch_equal_transformers(result: dict[str, Any]) -> None:
    assert result["logits_error"] < 1e-4


def test_a_packed_document_equals_the_document_alone(result: dict[str, Any]) -> None:
    assert result["packing_error"] < 1e-5


def test_log_probs_and_entropies_equal_transformers(result: dict[str, Any]) -> None:
    assert result["logp_error"] < 2e-5
    assert result["entropy_error"] < 2e-5


def test_the_loss_equals_transformers(result: dict[str, Any]) -> None:
    assert result["loss"] == pytest.approx(result["exact_loss"], rel=1e-5)


def test_every_gradient_equals_transformers(result: dict[str, Any]) -> None:
    """Summed over ranks, whatever the layout; tied weights get the gradient of both their uses."""
    assert result["grad_names_equal"]
    assert result["grad_error"] < 1e-5


def test_a_step_of_the_distributed_optimizer_moves_every_weight_by_its_gradient(result: dict[str, Any]) -> None:
    assert result["update_error"] < 1e-3
    assert result["tied_error"] == 0, "both stages that hold a tied weight take the same step"


@pytest.mark.parametrize("model", ["plain", "glm"])
def test_recompute_runs_the_moe_layers_again(measured: dict[str, Any], model: str) -> None:
    forwards = {layout: measured[f"{layout}/{model}"]["forwards"] for layout in LAYOUTS}
    assert {layout for layout, count in forwards.items() if count == 2} == {n for n in LAYOUTS if "recompute" in n}
    assert set(forwards.values()) == {1, 2}


def test_gradient_norm_counts_every_parameter_once(result: dict[str, Any]) -> None:
    assert result["grad_norm"] == pytest.approx(result["exact_grad_norm"], rel=1e-5)


def test_weights_survive_import_and_export_bitwise(result: dict[str, Any]) -> None:
    assert result["nan_before_load"]
    assert result["files_equal"]
    assert result["companions"]


def test_each_exported_tensor_is_whole_on_its_owner_only(result: dict[str, Any]) -> None:
    assert result["owners_right"]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("missing", "weight model.norm.weight is missing"),
        ("extra", "weight model.layers.9.mlp.gate.weight has no place"),
        ("misshapen", r"weight lm_head.weight must have shape \[512, 64\] by config.json, got \[511, 64\]"),
        ("nan", "NaN in the HF tensors of decoder.final_layernorm.weight"),
        ("whole", "^$"),
    ],
)
def test_damaged_weights_are_refused_by_name(measured: dict[str, Any], damage: str, said: str) -> None:
    assert re.search(said, measured["refusals"][damage])


def test_large_models_are_written_as_several_files_with_an_index(measured: dict[str, Any]) -> None:
    small = measured["small_files"]
    assert small["equal"] and small["files"] > 3 and small["largest"] < 150_000
