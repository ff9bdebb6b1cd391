"""The tiny model: reproducible, small, with a template whose mask and tool calls are what training needs."""

import asyncio
import json
import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_rl.cli.tiny import DISTRACTORS, TinyPaths, make_tiny
from megatron_rl.data.conversation import Conversation
from megatron_rl.data.mask import MaskConfig
from megatron_rl.data.render import ChatRenderer
from megatron_rl.rollout.environments.baker import Baker, BakerOptions
from megatron_rl.rollout.environments.baker_trace import TraceNoise, baker_trace
from megatron_rl.rollout.run import RolloutConfig, run_rollout


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyPaths:
    return make_tiny(tmp_path_factory.mktemp("tiny"), seed=0, num_train=300, num_heldout=20)


@pytest.fixture(scope="module")
def tokenizer(tiny: TinyPaths) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny.model)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_the_same_seed_writes_the_same_bytes(tiny: TinyPaths, tmp_path: Path) -> None:
    torch.manual_seed(99)
    before = torch.get_rng_state()
    again = make_tiny(tmp_path, seed=0, num_train=300, num_heldout=20)
    assert torch.equal(torch.get_rng_state(), before), "the caller's random state is left alone"
    for path in sorted(tiny.model.iterdir()):
        assert path.read_bytes() == (again.model / path.name).read_bytes(), path.name
    assert tiny.train.read_bytes() == again.train.read_bytes()
    assert tiny.heldout.read_bytes() == again.heldout.read_bytes()
    assert tiny.reasoning.read_bytes() == again.reasoning.read_bytes()


def test_rows_are_of_the_splits_they_name(tiny: TinyPaths) -> None:
    train, heldout = rows(tiny.train), rows(tiny.heldout)
    assert (len(train), len(heldout)) == (300, 20)
    env = Baker(BakerOptions(seed=1, distractors=DISTRACTORS))
    assert [row["messages"][0] for row in heldout] == [env.prompt("new_texts", i).messages[0] for i in range(20)]
    assert train[0]["tools"][0]["function"]["name"] == "buche_einnahme"


def test_the_model_is_a_float32_qwen3_moe_without_dense_layers(tiny: TinyPaths) -> None:
    from safetensors import safe_open

    config = json.loads((tiny.model / "config.json").read_text())
    assert config["architectures"] == ["Qwen3MoeForCausalLM"]
    with safe_open(tiny.model / "model.safetensors", "pt") as file:
        names = list(file.keys())
        shapes = {name: file.get_slice(name).get_shape() for name in names}
        dtypes = {file.get_slice(name).get_dtype() for name in names}
    assert dtypes == {"F32"}
    assert shapes["model.layers.3.mlp.experts.7.down_proj.weight"] == [128, 128]
    assert "lm_head.weight" not in shapes and not any("mlp.gate_proj" in name for name in shapes)
    numbers = [a * b for a, b in (shape for shape in shapes.values() if len(shape) == 2)]
    assert 1.8e6 < sum(numbers) < 1.9e6
    generation = json.loads((tiny.model / "generation_config.json").read_text())
    assert generation["eos_token_id"] == config["eos_token_id"] == 2


def test_the_template_renders_schema_call_and_result(tokenizer: Any) -> None:
    def call(amount: Any) -> dict[str, Any]:
        function = {"name": "buche_einnahme", "arguments": {"betrag": amount}}
        return {"role": "assistant", "content": "Also:", "tool_calls": [{"type": "function", "function": function}]}

    prompt = Baker(BakerOptions()).prompt("train", 0)
    messages = [{"role": "user", "content": "Hü?"}, call("14,40"), {"role": "tool", "content": "nein"}, call(14.4)]
    text = tokenizer.apply_chat_template(messages, tools=prompt.tools, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nbuche_einnahme(betrag: number): Bucht eine Einnahme in Euro.<|im_end|>\n"
        "<|im_start|>user\nHü?<|im_end|>\n"
        '<|im_start|>assistant\nAlso:<tool_call>{"name":"buche_einnahme","arguments":{"betrag":"14,40"}}</tool_call>'
        "<|im_end|>\n"
        "<|im_start|>tool\nnein<|im_end|>\n"
        '<|im_start|>assistant\nAlso:<tool_call>{"name":"buche_einnahme","arguments":{"betrag":14.4}}</tool_call>'
        "<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_mask_is_the_answer_and_its_end_of_turn(tiny: TinyPaths, tokenizer: Any) -> None:
    for row in rows(tiny.train)[:50]:
        encoded = tokenizer.apply_chat_template(
            row["messages"], tools=row["tools"], return_dict=True, return_assistant_tokens_mask=True
        )
        mask = encoded["assistant_masks"]
        text = tokenizer.decode([token for token, kept in zip(encoded["input_ids"], mask, strict=True) if kept])
        assert text.startswith(row["messages"][1]["content"]) and text.endswith("</tool_call><|im_end|>")
        prompt = tokenizer.apply_chat_template(
            row["messages"][:1], tools=row["tools"], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        assert encoded["input_ids"][: len(prompt)] == prompt and mask.index(1) == len(prompt)


def test_prompts_and_rows_are_short(tiny: TinyPaths, tokenizer: Any) -> None:
    samples = [
        tokenizer.apply_chat_template(
            row["messages"], tools=row["tools"], return_dict=True, return_assistant_tokens_mask=True
        )
        for row in rows(tiny.train)
    ]
    assert max(sample["assistant_masks"].index(1) for sample in samples) <= 130
    assert max(len(sample["input_ids"]) for sample in samples) <= 190
    assert max(sum(sample["assistant_masks"]) for sample in samples) <= 64, "fits rollout.max_new_tokens"


def test_reasoning_rows_book_right_in_none_to_three_workings_and_fit_with_any_effort(
    tiny: TinyPaths, tokenizer: Any
) -> None:
    found, renderer = rows(tiny.reasoning), ChatRenderer(tokenizer)
    env = Baker(BakerOptions(seed=1, distractors=DISTRACTORS))
    assert len({row["id"] for row in found}) == len(found)
    for row in found[:40]:
        question, booking = row["messages"]
        reasoning = booking.get("reasoning_content", "")
        call = json.dumps(booking["tool_calls"][0]["function"])
        prompt = env.prompt("train", int(row["id"].split("/")[-1]))
        assert prompt.messages == [question]
        assert env.episode(prompt).step(f"<tool_call>{call}</tool_call>").reward == 1
        rendered = renderer.render(Conversation(row["id"], row["messages"], row["tools"], "medium"), MaskConfig())
        trained = renderer.decode(rendered.token_ids[rendered.loss_mask].tolist())
        assert trained.startswith(f"<think>{reasoning}</think><tool_call>" if reasoning else "<tool_call>")
        assert "Reasoning effort: medium.\nbuche" in renderer.decode(rendered.token_ids[:60].tolist())
        assert len(rendered.token_ids) <= 256
    told = [row["messages"][1].get("reasoning_content", "").count("Noch einmal") for row in found]
    unreasoned = sum("reasoning_content" not in row["messages"][1] for row in found)
    assert {0, 1, 2} == set(told) and 0.04 < unreasoned / len(found) < 0.15
    assert {row["difficulty"] for row in found} == {"easy", "medium"}


def test_digits_are_single_tokens_and_tool_marks_survive_skipping_special_tokens(tokenizer: Any) -> None:
    assert len(tokenizer.tokenize("1440")) == 4
    ids = tokenizer("<tool_call>{}</tool_call><|im_end|>")["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<tool_call>{}</tool_call>"
    assert len(tokenizer) == 512


class Replay:
    """Samples what a rendered conversation says, turn by turn; fails if it is asked to go on from other tokens."""

    def __init__(self, conversation: list[int]) -> None:
        self._conversation = conversation

    async def generate(self, prompt_ids: Sequence[int], *, stop_token_ids: Sequence[int], **options: Any) -> Any:
        start = len(prompt_ids)
        assert self._conversation[:start] == list(prompt_ids)
        end = start + next(i for i, token in enumerate(self._conversation[start:]) if token in stop_token_ids) + 1
        ids = np.array(self._conversation[start:end], dtype=np.int32)
        return SimpleNamespace(
            token_ids=ids, logp=np.zeros(len(ids)), weight_version=np.zeros(len(ids)), finish_reason="stop"
        )


def test_a_rollout_with_a_tool_error_has_the_tokens_and_mask_of_the_rendered_conversation(tokenizer: Any) -> None:
    renderer, env = ChatRenderer(tokenizer), Baker(BakerOptions(level="full", decoy_tool=True))
    noise = TraceNoise(string_value=1.0, wrong_result=0.0, repaired=1.0)
    for index in range(20):
        prompt = env.prompt("train", index)
        token_ids, mask = renderer.conversation(baker_trace(prompt, random.Random(index), noise), prompt.tools)
        config = RolloutConfig(max_turns=2, max_new_tokens=200)
        rollout = asyncio.run(run_rollout(prompt, env, Replay(token_ids.tolist()), renderer, config, 0))
        (segment,) = rollout.segments
        assert (rollout.error, rollout.rewards) == ("", [1.0])
        length = len(segment.token_ids)
        np.testing.assert_array_equal(segment.token_ids, token_ids[:length])
        np.testing.assert_array_equal(segment.sampled, mask[:length])
        assert not mask[length:].any()
