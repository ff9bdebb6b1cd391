"""Recomputation of activations: the same gradients from fewer kept bytes, by running its parts again."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def measured(model_folder: Path, run_script: Callable[..., None], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What check_recompute.py measured on the model with one dense layer and two with experts."""
    work = tmp_path_factory.mktemp("recompute")
    run_script("check_recompute.py", 1, model_folder / "glm", work)
    return json.loads((work / "recompute.json").read_text())


def test_gradients_stay_bitwise_the_same(measured: Any) -> None:
    assert all(result["equal"] for result in measured.values())


def test_selective_runs_attention_cores_and_moe_layers_twice_and_nothing_else(measured: Any) -> None:
    """The two MoE layers hold the shared experts; the third SwiGLU is the dense layer's."""
    once = {"SelfAttention": 3, "PackedAttention": 3, "ExpertLayer": 2, "SwiGluMLP": 3}
    assert measured["none"]["runs"] == once
    assert measured["selective"]["runs"] == {**once, "PackedAttention": 6, "ExpertLayer": 4, "SwiGluMLP": 5}


def test_full_runs_every_layer_twice(measured: Any) -> None:
    assert measured["full"]["runs"] == {kind: 2 * runs for kind, runs in measured["none"]["runs"].items()}


def test_more_recomputation_keeps_fewer_bytes(measured: Any) -> None:
    none, selective, full = (measured[kind]["kept_bytes"] for kind in ("none", "selective", "full"))
    assert full < selective / 2 < none / 3
