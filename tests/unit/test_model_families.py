"""What a model folder may hold: every refusal is a ConfigError that names the setting."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from megatron_rl.config import ConfigError, DataError
from megatron_rl.distributed.config import ParallelConfig
from megatron_rl.model.families import family_for
from megatron_rl.model.folder import check_model_folder

make_hf_model = runpy.run_path(str(Path(__file__).parents[1] / "hf_models.py"))["make_hf_model"]
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

HF_MODELS = runpy.run_path(str(Path(__file__).parents[1] / "hf_models.py"))
QKV_SPANS = {"q": slice(0, 2), "k": slice(2, 3), "v": slice(3, 4)}


def saved_config(name: str) -> dict[str, Any]:
    """config.json of one of the tiny models, as transformers writes it."""
    config = HF_MODELS["hf_model"](name, 0).config
    return {**config.to_dict(), "architectures": ["Glm4MoeForCausalLM" if name[:3] == "glm" else "Qwen3MoeForCausalLM"]}


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


@pytest.mark.parametrize("name", HF_MODELS["MODELS"])
def test_weight_parts_are_exactly_the_tensors_that_transformers_saves(name: str, tmp_path: Path) -> None:
    HF_MODELS["make_hf_model"](tmp_path, name, 0)
    hf_config = check_model_folder(tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="numpy") as file:
        saved = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    parts = family_for(hf_config).weight_parts(hf_config)
    assert [part.name for part in parts] == sorted(saved)
    assert {part.name: part.shape for part in parts} == saved


@pytest.mark.parametrize("name", HF_MODELS["MODELS"])
def test_every_part_names_its_layer_and_the_kind_of_its_split(name: str) -> None:
    hf_config = saved_config(name)
    for part in family_for(hf_config).weight_parts(hf_config):
        layer = re.match(r"model\.layers\.(\d+)\.", part.name)
        at_the_end = part.name in ("lm_head.weight", "model.norm.weight")
        assert part.layer == (int(layer[1]) if layer else "last" if at_the_end else "first")
        assert all(f".layers.{part.layer}." in param for param in part.params if layer)
        expert = re.search(r"\.experts\.(\d+)\.", part.name)
        assert part.expert == (int(expert[1]) if expert else None)
        cut_in_rows = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
        module = part.name.split(".")[-2]
        cut_in_columns = module in ("o_proj", "down_proj")
        assert part.split == ("rows" if module in cut_in_rows else "columns" if cut_in_columns else "whole")
        assert part.dtype == ("float32" if part.name.endswith("e_score_correction_bias") else None)
        tied_embedding = part.name == "model.embed_tokens.weight" and hf_config["tie_word_embeddings"]
        assert part.copy_on_last == ("output_layer.weight" if tied_embedding else None)


def test_parts_of_a_fused_parameter_tile_it_in_megatrons_order() -> None:
    """Each kv head's query heads, then its k and v; gate above up. The same for weights, biases and expert stacks."""
    hf_config = saved_config("glm")
    parts = {part.name.removeprefix("model.layers.1."): part for part in family_for(hf_config).weight_parts(hf_config)}
    rows = torch.arange((2 + 1 + 1) * 2 * 32)
    head = {which: rows.view(2, 4, 32)[:, span].flatten() for which, span in QKV_SPANS.items()}
    for which, mine in head.items():
        for kind, fused in (("bias", rows), ("weight", rows[:, None].expand(-1, 64).contiguous())):
            part = parts[f"self_attn.{which}_proj.{kind}"]
            assert torch.equal(
                part.part(fused).reshape(part.shape), mine.view(-1, *[1] * (fused.dim() - 1)).expand(part.shape)
            )
    inner = torch.arange(2 * 48)[:, None].expand(-1, 64).contiguous()
    for fused in (inner, inner.view(2, 48, 64)):
        for name in ("mlp.experts.5", "mlp.shared_experts"):
            assert torch.equal(parts[f"{name}.gate_proj.weight"].part(fused), inner[:48])
            assert torch.equal(parts[f"{name}.up_proj.weight"].part(fused), inner[48:])


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
    with pytest.raises(ConfigError, match=r"Glm4MoeForCausalLM.*Qwen3MoeForCausalLM.*LlamaForCausalLM"):
        family_for({"architectures": ["LlamaForCausalLM"]})


def test_a_folder_that_fits_gives_its_config(tmp_path: Path) -> None:
    make_hf_model(tmp_path, "plain", 0)
    assert check_model_folder(tmp_path) == json.loads((tmp_path / "config.json").read_text())


def test_weights_that_config_json_does_not_describe_are_refused_by_name(tmp_path: Path) -> None:
    make_hf_model(tmp_path, "plain", 0)
    config = json.loads((tmp_path / "config.json").read_text())
    for change, said in (
        ({"num_hidden_layers": 3}, r"weight model\.layers\.2\..* is missing"),
        ({"num_hidden_layers": 1}, r"weight model\.layers\.1\..* has no place in the model"),
        ({"vocab_size": 500}, r"lm_head\.weight must have shape \[500, 64\] by config\.json, got \[512, 64\]"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(DataError, match=said):
            check_model_folder(tmp_path)
    save_file({"model.norm.weight": torch.zeros(64, dtype=torch.int32)}, tmp_path / "model.safetensors")
    with pytest.raises(DataError, match=r"model\.norm\.weight .* must be one of F32, BF16, F16, F64, got I32"):
        check_model_folder(tmp_path)


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
        (ParallelConfig(expert_tensor=5), "moe_intermediate_size must be a multiple of parallel.expert_tensor"),
        (ParallelConfig(pipeline=49), "parallel.pipeline must leave no stage empty, got 49 stages for 48 layers"),
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
