"""Tiny random models of every family, as transformers builds and saves them. For runpy: tests are no package."""

from pathlib import Path
from typing import Any

import torch

SIZES: dict[str, Any] = dict(
    vocab_size=512,
    hidden_size=64,
    moe_intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    num_experts_per_tok=2,
    norm_topk_prob=True,
    max_position_embeddings=256,
    tie_word_embeddings=False,
)
QWEN: dict[str, Any] = dict(num_hidden_layers=2, intermediate_size=128, num_experts=8)
GLM: dict[str, Any] = dict(
    num_hidden_layers=3,
    first_k_dense_replace=1,
    intermediate_size=96,
    n_routed_experts=8,
    n_shared_experts=1,
    n_group=2,
    topk_group=1,
    routed_scaling_factor=1.5,
    attention_bias=True,
    use_qk_norm=True,
    partial_rotary_factor=0.5,
)
MODELS: dict[str, dict[str, Any]] = {
    "plain": QWEN,
    "tied": dict(QWEN, tie_word_embeddings=True, norm_topk_prob=False, rope_theta=1e4, rms_norm_eps=1e-4),
    "glm": GLM,
    "glm_air": dict(
        GLM, n_group=1, routed_scaling_factor=1.0, use_qk_norm=False, n_shared_experts=2, partial_rotary_factor=0.25
    ),
}


def hf_model(name: str, seed: int, **overrides: Any) -> Any:
    """The model MODELS[name], random where transformers starts with ones or zeros, so that what is forgotten shows."""
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    sizes = {**SIZES, **MODELS[name], **overrides}
    if name.startswith("glm"):
        model: Any = Glm4MoeForCausalLM(Glm4MoeConfig(**sizes))
    else:
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" in key:
                parameter.uniform_(0.5, 1.5)
            elif key.endswith("bias"):
                parameter.normal_(0, 0.02)
            else:
                parameter.mul_(3.0)
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.03)
    return model


def make_hf_model(folder: Path, name: str, seed: int, **overrides: Any) -> Path:
    """The model saved to folder, with an empty file of the tokenizer's."""
    hf_model(name, seed, **overrides).save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text("{}")
    return folder
