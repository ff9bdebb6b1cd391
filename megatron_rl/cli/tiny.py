"""A model to learn the ropes with: tiny random MoE, its tokenizer and chat template, and SFT rows of `baker`.

The Qwen3-MoE has 1.84 M parameters: four MoE layers, hidden 128, eight experts of which a token takes two. It learns
the baker task's easy level in minutes on one CPU core. The GLM-4-MoE has the same sizes, but a dense first layer, a
shared expert, two groups of experts with a routing bias, biases on q, k and v, and RoPE on half of each head.
"""

import json
import random
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from megatron_rl.cli.output_folder import writing
from megatron_rl.data.effort_template import extend_template
from megatron_rl.rollout.environments.baker import Baker, BakerOptions
from megatron_rl.rollout.environments.baker_trace import TraceNoise, baker_trace

TinyFamily = Literal["qwen3_moe", "glm4_moe"]
VOCAB_SIZE = 512
_SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
"""Single tokens that stay visible when special tokens are skipped."""
DISTRACTORS = 0.3
"""Share of problems with sentences that do not matter; examples/rl/tiny_cpu.yaml asks for the same."""
_TOKENIZER_ROWS = 3000
_ERROR_ROWS = 300
"""Rows with tool errors for the tokenizer alone: the easy level's words do not fill the vocabulary."""
_ALL_REPAIRED = TraceNoise(string_value=1.0, repaired=1.0)
_NO_NOISE = TraceNoise(string_value=0.0, wrong_result=0.0)
_REASONING_ROWS = 512
_REASONING_WEIGHTS = (1, 3, 4, 3)
"""How often the working is told no, one, two or three times."""


_OF_FAMILY: dict[TinyFamily, dict[str, Any]] = {
    "qwen3_moe": dict(num_experts=8, decoder_sparse_step=1, mlp_only_layers=[], tie_word_embeddings=True),
    "glm4_moe": dict(
        n_routed_experts=8,
        n_shared_experts=1,
        n_group=2,
        topk_group=1,
        routed_scaling_factor=1.5,
        first_k_dense_replace=1,
        num_nextn_predict_layers=0,
        use_qk_norm=True,
        attention_bias=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    ),
}


@dataclass(frozen=True)
class TinyPaths:
    """What make_tiny wrote."""

    model: Path
    """HF folder: config.json, float32 safetensors, tokenizer with chat template, generation_config.json."""
    train: Path
    """JSONL of {"messages", "tools"}; texts and numbers of the train split."""
    heldout: Path
    """The same for the split new_texts."""
    reasoning: Path
    """Further rows of the train split, with id, difficulty and reasoning: what `megatron-rl label` is for."""


def make_tiny(
    folder: Path,
    *,
    seed: int = 0,
    num_train: int = 8000,
    num_heldout: int = 256,
    options: BakerOptions | None = None,
    noise: TraceNoise | None = None,
    family: TinyFamily = "qwen3_moe",
) -> TinyPaths:
    """Writes model, train.jsonl, heldout.jsonl and reasoning.jsonl into folder, over what is there.

    Same seed, same bytes. RunError where the disk is full or refuses.
    """
    environment = Baker(options or BakerOptions(seed=seed + 1, distractors=DISTRACTORS))
    paths = TinyPaths(folder / "model", folder / "train.jsonl", folder / "heldout.jsonl", folder / "reasoning.jsonl")
    rows = _rows(environment, "train", max(num_train, _TOKENIZER_ROWS), seed, noise or TraceNoise())
    heldout = _rows(environment, "new_texts", num_heldout, seed, noise or TraceNoise())
    errors = _rows(Baker(BakerOptions(level="full", seed=seed + 1)), "train", _ERROR_ROWS, seed, _ALL_REPAIRED)
    with writing(folder):
        paths.model.mkdir(parents=True, exist_ok=True)
        _write_jsonl(paths.train, rows[:num_train])
        _write_jsonl(paths.heldout, heldout)
        _write_jsonl(paths.reasoning, _reasoning_rows(environment, max(num_train, _TOKENIZER_ROWS), seed))
        _save_tokenizer(rows[:_TOKENIZER_ROWS] + errors, paths.model)
        _save_model(paths.model, seed, family)
    return paths


def _rows(environment: Baker, split: str, count: int, seed: int, noise: TraceNoise) -> list[dict[str, Any]]:
    rows = []
    for index in range(count):
        prompt = environment.prompt(split, index)
        messages = baker_trace(prompt, random.Random(f"trace/{seed}/{split}/{index}"), noise)
        rows.append({"messages": messages, "tools": prompt.tools})
    return rows


def _reasoning_rows(environment: Baker, first: int, seed: int) -> list[dict[str, Any]]:
    """Right bookings of problems from first on, the working as reasoning: none, once, or checked once or twice."""
    rows = []
    for index in range(first, first + _REASONING_ROWS):
        prompt = environment.prompt("train", index)
        rng = random.Random(f"reasoning/{seed}/{index}")
        messages = baker_trace(prompt, rng, _NO_NOISE)
        booking = messages[-1]
        repeats = rng.choices(range(4), weights=_REASONING_WEIGHTS)[0]
        if repeats:
            booking["reasoning_content"] = " Noch einmal: ".join([booking["content"]] * repeats)
        booking["content"] = ""
        difficulty = "easy" if prompt.task["kind"] == "single" else "medium"
        rows.append({"id": prompt.prompt_id, "difficulty": difficulty, "messages": messages, "tools": prompt.tools})
    return rows


def _write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def _save_tokenizer(rows: list[dict[str, Any]], folder: Path) -> None:
    """Byte-level BPE with single digits, trained on rendered rows."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    template = resources.files("megatron_rl.cli").joinpath("tiny_chat.jinja").read_text(encoding="utf-8").rstrip("\n")
    template = extend_template(template)
    renderer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), chat_template=template)
    texts = [str(renderer.apply_chat_template(row["messages"], tools=row["tools"], tokenize=False)) for row in rows]
    for mark in (*_SPECIAL_TOKENS, *_MARKS):
        texts = [text.replace(mark, "\n") for text in texts]
    bpe = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(_MARKS),
        special_tokens=list(_SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in _MARKS])
    PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=template,
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    ).save_pretrained(folder)


def _save_model(folder: Path, seed: int, family: TinyFamily) -> None:
    """Weights as transformers initialises them, float32."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
    from transformers.utils import logging as transformers_logging

    pad_id, end_of_turn_id = _SPECIAL_TOKENS.index("<|endoftext|>"), _SPECIAL_TOKENS.index("<|im_end|>")
    settings: dict[str, Any] = dict(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=512,
        pad_token_id=pad_id,
        eos_token_id=end_of_turn_id,
        dtype="float32",
    )
    transformers_logging.disable_progress_bar()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings, **_OF_FAMILY[family]))
        for name, bias in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                bias.normal_(std=0.05)
    model.generation_config = GenerationConfig(eos_token_id=end_of_turn_id, pad_token_id=pad_id)
    model.save_pretrained(folder)
