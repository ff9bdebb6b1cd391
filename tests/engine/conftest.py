"""Real vLLM servers of tiny random models, and transformers' answers for any weights."""

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_rl.engine.client import EngineControl
from megatron_rl.engine.config import EngineConfig
from megatron_rl.engine.server import engine_command, free_port, wait_until_ready
from megatron_rl.weight_sync.config import WeightSyncConfig
from megatron_rl.weight_sync.publisher import Publisher

Weights = Mapping[str, Tensor]
CONFIG = EngineConfig(dtype="float32", kv_cache_gib=0.25, max_model_len=1024)
CHAT_TEMPLATE = """
{%- for message in messages -%}
    {{- '<' + message.role + '>' -}}
    {%- if empty_reasoning and message.role == 'assistant' -%}{{- '<think>\n\n</think>\n\n' -}}{%- endif -%}
    {{- message.content + ('' if loop.last and not add_generation_prompt else '\n') -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<assistant>' -}}{%- endif -%}
"""
"""With empty_reasoning it closes the reasoning of an unfinished message, as Qwen3's does."""


def make_model(folder: Path, *, seed: int, tied: bool) -> Path:
    """A random Qwen3-MoE with a byte tokenizer, sharp enough that wrong weights move log-probs by nats."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    sizes: dict[str, Any] = dict(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=1024,
        tie_word_embeddings=tied,
        initializer_range=0.08,
    )
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes)).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in ("<think>", "</think>")])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=CHAT_TEMPLATE).save_pretrained(folder)
    return folder


class Oracle:
    """Log-probs by transformers in float32."""

    def __init__(self, folder: Path) -> None:
        from transformers import Qwen3MoeForCausalLM

        self.weights: Weights = load_file(folder / "model.safetensors")
        self.model: Any = Qwen3MoeForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    @torch.no_grad()
    def logp(self, token_ids: list[int], temperature: float = 1.0) -> np.ndarray:
        """[T], entry 0 NaN."""
        logits = self.model(torch.tensor([token_ids])).logits[0, :-1] / temperature
        taken = logits.log_softmax(-1).gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0]
        return np.array([np.nan, *taken.tolist()])


@dataclass
class Specification:
    """TensorSpec of one tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def specifications(weights: Weights) -> list[Specification]:
    """Layout of a state dict, by name."""
    return [
        Specification(name, str(weights[name].dtype).removeprefix("torch."), tuple(weights[name].shape))
        for name in sorted(weights)
    ]


class Server:
    """One running engine, and two sets of weights for it: first is what it was started with."""

    def __init__(self, folder: Path, *, tied: bool) -> None:
        self.log_path = folder / "server.log"
        model = self.model_path = make_model(folder / "first", seed=1, tied=tied)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        argv, environment = engine_command(CONFIG, model, platform="cpu", port=self.port)
        with self.log_path.open("w") as log:
            self.process = subprocess.Popen(
                argv, env={**os.environ, **environment}, stdout=log, stderr=log, start_new_session=True
            )
        self.first = Oracle(model)
        self.second = Oracle(make_model(folder / "second", seed=2, tied=tied))
        self.control = EngineControl(self.url, timeout_s=60)
        self._version = 0
        self._publisher: Publisher | None = None

    def wait(self) -> None:
        """Returns when it serves."""
        wait_until_ready(self.url, self.process, self.log_path, 200)

    def publish(self, oracle: Oracle, *, fresh: bool = False, **options: Any) -> int:
        """Makes the engine serve the oracle's weights; the new version."""
        self._serving = oracle
        if self._publisher is None or fresh:
            self._publisher = Publisher(
                specifications(oracle.weights), self._export, [self.control], config=WeightSyncConfig(), **options
            )
        self._version += 1
        self._publisher.publish(self._version)
        return self._version

    def _export(self, owners: Mapping[str, int]) -> Iterator[tuple[str, Tensor | None]]:
        assert set(owners.values()) == {0}
        yield from ((name, self._serving.weights[name]) for name in sorted(owners))

    def stop(self) -> None:
        """Ends every process of the server."""
        self.control.close()
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    """Started side by side: one model with a head of its own, one with a tied head."""
    started = {
        name: Server(tmp_path_factory.mktemp(name), tied=name == "tied_head") for name in ("own_head", "tied_head")
    }
    try:
        for server in started.values():
            server.wait()
        yield started
    finally:
        for server in started.values():
            server.stop()


@pytest.fixture(scope="session")
def server(servers: dict[str, Server]) -> Server:
    """The engine of the quickstart's kind of model: tied head."""
    return servers["tied_head"]
