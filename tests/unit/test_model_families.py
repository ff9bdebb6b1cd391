"""What a model folder may hold: every refusal is a ConfigError that names the setting."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.config import ConfigError
from megatron_rl.distributed.config import ParallelConfig
from megatron_rl.model.families import family_for
from megatron_rl.model.folder import check_model_folder

RELEASED: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
"""config.json of Qwen3-30B-A3B, without what the model does not read."""


def newer_spelling(config: dict[str, Any]) -> dict[str, Any]:
    """The same model as transformers 5 writes it."""
    renamed = {k: v for k, v in config.items() if k not in ("rope_theta", "rope_scaling", "num_experts")}
    rope = {"rope_theta": config["rope_theta"], "rope_type": "default"}
    return {**renamed, "rope_parameters": rope, "num_local_experts": config["num_experts"]}


def write_folder(folder: Path, config: Any, *, weights: bool = True) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    if weights:
        (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return folder


def test_older_and_newer_spelling_describe_the_same_model() -> None:
    family = family_for(RELEASED)
    for describe in (family.transformer_kwargs, family.model_kwargs):
        assert describe(RELEASED) == describe(newer_spelling(RELEASED))
    assert family.model_kwargs(RELEASED)["rotary_base"] == 1e6


def test_weight_parts_are_every_tensor_of_the_released_model() -> None:
    """Qwen3-30B-A3B has 18,867 tensors and 30.5 G parameters."""
    parts = family_for(RELEASED).weight_parts(RELEASED)
    names = [part.name for part in parts]
    assert len(names) == len(set(names)) == 48 * (9 + 3 * 128) + 3
    assert names == sorted(names)
    total = sum(rows * (columns[0] if columns else 1) for rows, *columns in (part.shape for part in parts))
    assert total == pytest.approx(30.53e9, rel=1e-3)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "RoPE type"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "RoPE type"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_only_layers": [0]}, "mlp_only_layers"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_dropout": 0.1}, "attention_dropout"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"num_key_value_heads": 5}, "num_key_value_heads"),
        ({"num_experts": None}, "num_experts"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused_by_name(change: dict[str, Any], named: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", {**RELEASED, **change})
    with pytest.raises(ConfigError, match=named):
        check_model_folder(folder)


def test_another_architecture_is_refused_with_the_supported_ones() -> None:
    with pytest.raises(ConfigError, match=r"Qwen3MoeForCausalLM.*LlamaForCausalLM"):
        family_for({"architectures": ["LlamaForCausalLM"]})


def test_a_folder_that_fits_gives_its_config(tmp_path: Path) -> None:
    assert check_model_folder(write_folder(tmp_path / "model", RELEASED)) == RELEASED


def test_broken_folders_are_refused_by_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        check_model_folder(tmp_path / "absent")
    with pytest.raises(ConfigError, match=r"config\.json must be JSON"):
        check_model_folder(write_folder(tmp_path / "broken", "{"))
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        check_model_folder(write_folder(tmp_path / "weightless", RELEASED, weights=False))
    indexed = write_folder(tmp_path / "indexed", RELEASED)
    index = {"weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}}
    (indexed / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match="model-00002-of-00002"):
        check_model_folder(indexed)


@pytest.mark.parametrize(
    ("parallel", "named"),
    [
        (ParallelConfig(tensor=8), "num_key_value_heads must be a multiple of parallel.tensor, got 4 and 8"),
        (ParallelConfig(tensor=3), "num_attention_heads"),
        (ParallelConfig(expert=7), "num_experts must be a multiple of parallel.expert, got 128 and 7"),
    ],
)
def test_sizes_that_a_layout_does_not_divide_are_refused(parallel: ParallelConfig, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        family_for(RELEASED).check_parallel(RELEASED, parallel)


def test_a_vocabulary_that_does_not_divide_is_refused() -> None:
    config = {**RELEASED, "vocab_size": 151937}
    with pytest.raises(ConfigError, match="vocab_size"):
        family_for(config).check_parallel(config, ParallelConfig(tensor=2))


def test_looking_at_models_and_checkpoints_imports_no_megatron() -> None:
    """Launchers check a run in milliseconds; Megatron takes seconds."""
    modules = ("model.folder", "model.config", "distributed.config", "distributed.device", "checkpoint.resume")
    code = (
        f"import sys\nfor m in {modules}: __import__(f'megatron_rl.{{m}}')\nassert 'megatron.core' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
