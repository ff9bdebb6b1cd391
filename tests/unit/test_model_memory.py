"""The memory estimate: what must add up over ranks, and what each option saves. The sizes themselves: tests/ranks."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.distributed.config import ParallelConfig
from megatron_rl.model.config import ModelConfig
from megatron_rl.model.memory import RankMemory, stage_memory

QWEN = json.loads((Path(__file__).parents[2] / "examples/models/Qwen3-30B-A3B/config.json").read_text())
GIB = 2**30


def stages(world_size: int = 1, tokens: int = 4096, **options: Any) -> list[RankMemory]:
    """Of Qwen3-30B-A3B in bfloat16."""
    model = {key: options.pop(key) for key in ("dtype", "recompute") if key in options}
    return stage_memory(
        options.pop("hf_config", QWEN),
        ModelConfig(**{"path": "", "dtype": "bfloat16", **model}),
        ParallelConfig(**options),
        world_size=world_size,
        microbatch_tokens=tokens,
        platform="cuda",
    )


def test_one_rank_holds_the_published_number_of_parameters() -> None:
    (memory,) = stages()
    parameters = memory.parameters / 2
    assert parameters == pytest.approx(30.5e9, rel=0.005), "30.5 billion, says the model's card"
    assert memory.gradients == 4 * parameters and memory.optimizer == 12 * parameters


@pytest.mark.parametrize(
    "layout",
    [
        dict(expert=8),
        dict(tensor=2, expert=4),
        dict(tensor=4, expert=2, expert_tensor=2),
        dict(pipeline=4, expert=2),
        dict(tensor=2, context=2, expert=4, pipeline=2),
    ],
)
def test_optimizer_state_is_held_once_over_all_ranks(layout: dict[str, int]) -> None:
    """But for routers and norms, which every tensor-parallel rank holds whole."""
    ranks = 16
    uncut = 48 * (128 * 2048 + 2 * 2048 + 2 * 128) + 2048
    of_stages = stages(ranks, **layout)
    held = sum(stage.optimizer for stage in of_stages) * ranks / len(of_stages)
    assert held == stages()[0].optimizer + 12 * uncut * (layout.get("tensor", 1) - 1)


def test_ranks_of_a_pipeline_hold_the_model_once_and_the_first_most_activations() -> None:
    of_stages = stages(4, pipeline=4)
    assert sum(stage.parameters for stage in of_stages) == stages()[0].parameters
    activations = [stage.activations for stage in of_stages]
    assert activations == sorted(activations, reverse=True) and activations[0] == 4 * activations[3]
    assert [stage.head > 0 for stage in of_stages] == [False, False, False, True]


def test_a_tied_head_is_counted_twice_where_first_and_last_stage_differ() -> None:
    tied = {**QWEN, "tie_word_embeddings": True}
    vocabulary = 2 * 151936 * 2048
    assert stages(2, pipeline=2, hf_config=tied)[1].parameters == stages(2, pipeline=2)[1].parameters
    assert stages(hf_config=tied)[0].parameters == stages()[0].parameters - vocabulary


def test_what_lowers_activations() -> None:
    whole = stages()[0].activations
    assert stages(2, tensor=2)[0].activations == pytest.approx(whole / 2)
    assert stages(2, context=2)[0].activations == pytest.approx(whole / 2)
    assert stages(tokens=2048)[0].activations == pytest.approx(whole / 2)
    selective, full = (stages(recompute=mode)[0].activations for mode in ("selective", "full"))
    assert full < selective < whole
    # Full recompute keeps the input of 48 layers and one layer's activations.
    assert full == pytest.approx(4096 * 48 * 2048 * 2 + whole / 48)


def test_an_expert_bias_is_carried_and_neither_trained_nor_cut() -> None:
    glm = {
        "architectures": ["Glm4MoeForCausalLM"],
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_hidden_layers": 3,
        "vocab_size": 512,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 48,
        "intermediate_size": 128,
        "first_k_dense_replace": 1,
        "max_position_embeddings": 256,
    }
    (memory,) = stages(hf_config=glm)
    assert memory.parameters - memory.gradients / 2 == 2 * 8 * 4, "two MoE layers, eight experts, float32"
