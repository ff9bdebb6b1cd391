"""Costs against pairs of positions counted one by one, and against the weights of real models."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.config import ConfigError
from megatron_rl.data.cost import CostModel, attention_cost, document_costs

LENGTHS = st.lists(st.integers(0, 50), max_size=12)
K = 1024
DENSE: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 500,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
OF_LAYER = 2.0 * 8 * 16
"""Two products of heads * head_dim multiply-adds for half of the squared length."""


def test_one_document_of_256k_costs_64_times_64_documents_of_4k() -> None:
    """SPEC 12, in units of k squared."""
    assert attention_cost([256 * K]) == 65_536 * K**2
    assert attention_cost([4 * K] * 64) == 1_024 * K**2
    assert CostModel().cost([256 * K]) == 64 * CostModel().cost([4 * K] * 64)


@given(LENGTHS, st.integers(1, 60) | st.none())
def test_attention_costs_twice_the_pairs_of_positions_less_the_diagonal(lengths: list[int], window: int | None) -> None:
    """A position attends to itself and to the window - 1 before it; the diagonal is a linear cost, not attention's."""
    pairs = sum(min(position, window or position) for n in lengths for position in range(1, n + 1))
    diagonal = sum(min(n, window or n) for n in lengths)
    assert attention_cost(lengths, window=window) == 2 * pairs - diagonal
    assert document_costs(lengths, window=window).tolist() == [attention_cost([n], window=window) for n in lengths]


@given(LENGTHS, LENGTHS)
def test_the_cost_of_a_sequence_is_the_sum_over_its_documents(first: list[int], second: list[int]) -> None:
    model = CostModel(full=2.0, windows=((7, 3.0), (20, 0.5)), per_token=11.0)
    by_hand = sum(
        2 * n * n + 3 * attention_cost([n], window=7) + 0.5 * attention_cost([n], window=20) + 11 * n for n in first
    )
    assert model.cost(first) == pytest.approx(by_hand)
    assert model.cost(first + second) == pytest.approx(model.cost(first) + model.cost(second))
    assert model.of_documents(first).sum() == pytest.approx(model.cost(first))


def test_the_longest_documents_cost_what_they_cost_exactly() -> None:
    assert attention_cost([2**30, 2**30]) == 2 * 2**60
    assert attention_cost([2**30], window=4096) == 4096 * (2**31 - 4096)


def test_window_must_be_a_position_at_least() -> None:
    with pytest.raises(ValueError, match="window must be at least 1 position, got 0"):
        attention_cost([3], window=0)


def test_a_dense_model_costs_its_matrices_per_token_and_its_scores_per_squared_token() -> None:
    layer = 64 * 16 * (8 + 2 + 2 + 8) + 3 * 64 * 96
    assert CostModel.from_hf_config(DENSE) == CostModel(4 * OF_LAYER, (), 2.0 * (4 * layer + 64 * 500))


@pytest.mark.parametrize(
    ("changes", "num_dense", "expert_hidden"),
    [
        ({}, 0, 2 * 32),
        ({"mlp_only_layers": [1]}, 1, 2 * 32),
        ({"decoder_sparse_step": 3}, 3, 2 * 32),
        ({"first_k_dense_replace": 1, "n_shared_experts": 1}, 1, 3 * 32),
        ({"shared_expert_intermediate_size": 40}, 0, 2 * 32 + 40),
    ],
)
def test_a_token_passes_the_experts_it_takes_and_no_others(
    changes: dict[str, Any], num_dense: int, expert_hidden: int
) -> None:
    mlp = num_dense * 3 * 64 * 96 + (4 - num_dense) * 64 * (3 * expert_hidden + 8)
    weights = 4 * 64 * 16 * 20 + mlp + 64 * 500
    assert CostModel.from_hf_config({**DENSE, **EXPERTS, **changes}).per_token == 2 * weights


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8},
        {
            "architectures": ["Glm4MoeForCausalLM"],
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
        },
    ],
)
def test_the_weights_of_a_token_are_the_matrices_that_the_trainer_has_for_it(changes: dict[str, Any]) -> None:
    """All but the embedding, and of the experts' the share that a token takes."""
    from megatron_rl.model.families import family_for  # imports torch

    experts = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
    hf_config = {**DENSE, **experts, "max_position_embeddings": 512, **changes}
    matrices = [
        part
        for part in family_for(hf_config).weight_parts(hf_config)
        if len(part.shape) == 2 and not part.name.endswith("embed_tokens.weight")
    ]
    weights = sum(part.shape[0] * part.shape[1] * (1 if part.expert is None else 2 / 8) for part in matrices)
    assert CostModel.from_hf_config(hf_config).per_token == pytest.approx(2 * weights, rel=1e-12)


@pytest.mark.parametrize(
    ("changes", "full", "windows"),
    [
        ({"sliding_window": None, "use_sliding_window": False}, 4, ()),
        ({"sliding_window": 9, "use_sliding_window": False}, 4, ()),
        ({"sliding_window": 9}, 0, ((9, 4),)),
        ({"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 3}, 3, ((9, 1),)),
        ({"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 9}, 2, ((9, 2),)),
        ({"layer_types": ["linear_attention"] * 3 + ["full_attention"]}, 1, ()),
        ({"layer_types": ["linear_attention"] * 4}, 0, ()),
    ],
)
def test_a_layer_costs_what_its_kind_of_attention_costs(
    changes: dict[str, Any], full: int, windows: tuple[tuple[int, int], ...]
) -> None:
    model = CostModel.from_hf_config({**DENSE, **changes})
    assert model.full == full * OF_LAYER
    assert model.windows == tuple((window, count * OF_LAYER) for window, count in windows)
    assert model.per_token == CostModel.from_hf_config(DENSE).per_token


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "config.json must set hidden_size"),
        ({"num_hidden_layers": "4"}, 'num_hidden_layers must be a whole number above 0, got "4"'),
        ({"num_experts": -1}, "num_experts must be a whole number of 0 or more, got -1"),
        ({"layer_types": ["full_attention"]}, "layer_types must have one kind for each of 4 layers"),
        ({"layer_types": ["chunked"] * 4}, 'known for the layer_types full_attention, .*, got "chunked"'),
        ({"layer_types": ["sliding_attention"] * 4}, "config.json must set sliding_window"),
        ({"num_experts": 8}, "config.json must set num_experts_per_tok"),
    ],
)
def test_a_config_whose_cost_is_unknown_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CostModel.from_hf_config({**DENSE, **changes})


@given(st.floats(0.1, 10), st.floats(0, 1000), st.floats(0, 10), st.integers(1, 50))
def test_from_its_even_length_on_attention_costs_more_than_the_rest(
    full: float, per_token: float, windowed: float, window: int
) -> None:
    model = CostModel(full, ((window, windowed),), per_token)
    length = model.even_length()
    assert length is not None
    attention = CostModel(full, ((window, windowed),))
    assert attention.cost([length]) > per_token * length
    assert length == 1 or attention.cost([length - 1]) <= per_token * (length - 1)


def test_the_even_length_is_the_first_above_a_tie() -> None:
    assert CostModel(1.0, (), 10.0).even_length() == 11


def test_attention_that_is_linear_never_outgrows_the_rest() -> None:
    assert CostModel(0.0, ((8, 1.0),), 100.0).even_length() is None
    assert CostModel(0.0, (), 1.0).even_length() is None


def test_costs_of_arrays_and_lists_are_the_same() -> None:
    lengths = np.array([3, 5], dtype=np.int32)
    assert attention_cost(lengths) == attention_cost([3, 5]) == 34
    assert attention_cost([]) == 0 and CostModel().cost([]) == 0.0
