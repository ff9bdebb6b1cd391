"""The engine on a GPU: the same server, the same wire, real kernels."""

import asyncio
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_rl.engine.client import EngineClient, EngineControl
from megatron_rl.engine.config import EngineConfig
from megatron_rl.engine.server import engine_command, free_port, wait_until_ready
from megatron_rl.records import TensorSlot
from megatron_rl.weight_sync.config import WeightSyncConfig
from megatron_rl.weight_sync.publisher import Publisher

PROBE = [(7 * i) % 480 + 10 for i in range(200)]


def _make_model(folder: Path, seed: int) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    sizes: dict[str, Any] = dict(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
    )
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes))
    model.save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return model.eval()


@torch.no_grad()
def _logp(model: Any, token_ids: list[int]) -> np.ndarray:
    logp = model(torch.tensor([token_ids])).logits[0, :-1].log_softmax(-1)
    return logp.gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0].numpy()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[tuple[str, Any]]:
    """(URL, the model it was started with)."""
    model, port, log_path = _make_model(tmp_path / "model", 1), free_port(), tmp_path / "engine.log"
    config = EngineConfig(dtype="float32", gpu_memory_share=0.3, max_model_len=1024)
    argv, environment = engine_command(config, tmp_path / "model", platform="cuda", port=port)
    with log_path.open("w") as log:
        process = subprocess.Popen(
            argv, env={**os.environ, **environment}, stdout=log, stderr=log, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_ready(url, process, log_path, 280)
        yield url, model
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_engine_samples_and_takes_new_weights_on_a_gpu(engine: tuple[str, Any], tmp_path: Path) -> None:
    """float32 kernels on a GPU may use TF32: 1e-2 separates them from wrong weights, which are off by tenths."""
    from safetensors.torch import load_file

    url, model = engine
    control = EngineControl(url, timeout_s=60)
    assert np.abs(control.prompt_logprobs(PROBE)[1:] - _logp(model, PROBE)).max() < 1e-2
    other = _make_model(tmp_path / "other", 2)
    weights = load_file(tmp_path / "other" / "model.safetensors")

    def export(owners: Mapping[str, int]) -> Iterator[tuple[str, Tensor | None]]:
        yield from ((name, weights[name].cuda()) for name in sorted(owners))

    specs = [TensorSlot(name, "float32", tuple(weights[name].shape), 0, 0) for name in sorted(weights)]
    Publisher(specs, export, [control], config=WeightSyncConfig()).publish(1)
    assert np.abs(control.prompt_logprobs(PROBE)[1:] - _logp(other, PROBE)).max() < 1e-2

    async def sample() -> Any:
        client = EngineClient(url, timeout_s=60)
        try:
            return await client.generate(PROBE[:40], max_tokens=16, temperature=1.0, stop_token_ids=[])
        finally:
            await client.close()

    completion = asyncio.run(sample())
    expected = _logp(other, PROBE[:40] + completion.token_ids.tolist())[39:]
    assert np.abs(expected - completion.logp).max() < 1e-2
    assert set(completion.weight_version.tolist()) == {1}
