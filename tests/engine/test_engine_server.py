"""One real vLLM server on the CPU against transformers: tokens, log-probs, versions, weight updates, its end."""

import asyncio
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from megatron_rl.engine.client import EngineClient
from megatron_rl.engine.config import EngineConfig
from megatron_rl.engine.errors import EngineError
from megatron_rl.engine.records import Completion
from megatron_rl.engine.server import engine_command, require_free_port, wait_until_ready
from megatron_rl.records import TensorSlot, WeightManifest
from megatron_rl.weight_sync.errors import WeightSyncError
from megatron_rl.weight_sync.nixl import NixlWriter
from megatron_rl.weight_sync.plan import arena_layout

LOGP_MAX, LOGP_MEAN = 1e-4, 2e-5
"""Nats; float32 on both sides."""
PROBE = [(7 * i) % 480 + 10 for i in range(200)]


def prompt(index: int, length: int = 40) -> list[int]:
    return [(index * 7 + j * 3) % 480 + 10 for j in range(length)]


def sample(server: Any, prompts: list[list[int]], **options: Any) -> list[Completion]:
    """One completion per prompt, all at the same time."""
    arguments: dict[str, Any] = dict(max_tokens=24, temperature=1.0, stop_token_ids=[]) | options

    async def run() -> list[Completion]:
        client = EngineClient(server.url, timeout_s=60)
        try:
            return await asyncio.gather(*(client.generate(ids, **arguments) for ids in prompts))
        finally:
            await client.close()

    return asyncio.run(run())


def sampled_error(oracle: Any, ids: list[int], completion: Completion, temperature: float = 1.0) -> np.ndarray:
    """|engine log-prob - oracle's| of every sampled token."""
    expected = oracle.logp(ids + completion.token_ids.tolist(), temperature)[len(ids) :]
    return np.abs(expected - completion.logp)


def prompt_error(server: Any, oracle: Any) -> float:
    """Largest |log-prob - oracle's| of a fixed text."""
    return float(np.nanmax(np.abs(server.control.prompt_logprobs(PROBE) - oracle.logp(PROBE))))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampled_logprobs_are_those_of_the_model_at_the_sampling_temperature(server: Any, temperature: float) -> None:
    server.publish(server.first)
    prompts = [prompt(i, 20 + i) for i in range(24)]
    completions = sample(server, prompts, temperature=temperature)
    errors = np.concatenate(
        [sampled_error(server.first, ids, c, temperature) for ids, c in zip(prompts, completions, strict=True)]
    )
    assert len(errors) == 24 * 24
    assert errors.max() <= LOGP_MAX and errors.mean() <= LOGP_MEAN


def test_a_stop_token_ends_a_completion_and_belongs_to_it(server: Any) -> None:
    stop_ids = list(range(10, 490))
    (completion,) = sample(server, [prompt(0)], stop_token_ids=stop_ids, max_tokens=200)
    assert completion.finish_reason == "stop" and int(completion.token_ids[-1]) in stop_ids
    assert not set(completion.token_ids[:-1].tolist()) & set(stop_ids)
    (cut,) = sample(server, [prompt(0)], max_tokens=3)
    assert cut.finish_reason == "length" and len(cut.token_ids) == len(cut.logp) == len(cut.weight_version) == 3


@pytest.mark.parametrize("name", ["own_head", "tied_head"])
def test_after_an_update_the_engine_computes_with_the_new_weights(servers: dict[str, Any], name: str) -> None:
    server = servers[name]
    server.publish(server.first)
    assert prompt_error(server, server.first) <= LOGP_MAX
    for oracle, other in ((server.second, server.first), (server.first, server.second)):
        version = server.publish(oracle)
        assert prompt_error(server, oracle) <= LOGP_MAX
        assert prompt_error(server, other) > 0.5, "the two sets of weights must differ to show anything"
        assert server.control.weight_version() == version
        ids = prompt(3)
        (completion,) = sample(server, [ids])
        assert sampled_error(oracle, ids, completion).max() <= LOGP_MAX
        assert set(completion.weight_version.tolist()) == {version}


def test_running_requests_go_on_through_an_update_with_their_keys_and_values(server: Any) -> None:
    old = server.publish(server.first)
    prompts = [prompt(i) for i in range(4)]

    async def run() -> list[Completion]:
        client = EngineClient(server.url, timeout_s=60)
        running = [
            asyncio.create_task(client.generate(ids, max_tokens=900, temperature=1.0, stop_token_ids=[]))
            for ids in prompts
        ]
        await _some_steps(client)
        await asyncio.to_thread(server.publish, server.second)
        completions = await asyncio.gather(*running)
        await client.close()
        return completions

    completions = asyncio.run(run())
    for ids, completion in zip(prompts, completions, strict=True):
        versions = completion.weight_version
        assert len(versions) == 900 and (np.diff(versions) >= 0).all()
        assert set(versions.tolist()) == {old, old + 1}, "the update must fall into the sampling"
        switch = int((versions == old).sum())
        expected = _mixed_logp(server, ids, completion.token_ids.tolist(), switch)
        assert np.abs(expected - completion.logp).max() <= LOGP_MAX


async def _some_steps(client: EngineClient) -> None:
    """Returns when requests sent before have some tokens: the engine serves in order."""
    await asyncio.sleep(0)
    await client.generate(prompt(9), max_tokens=8, temperature=1.0, stop_token_ids=[])


@torch.no_grad()
def _mixed_logp(server: Any, ids: list[int], sampled: list[int], switch: int) -> np.ndarray:
    """The first `switch` tokens by the old weights, the rest by the new ones on top of the old keys and values. [T]"""
    tokens, start = torch.tensor([ids + sampled]), len(ids) + switch - 1
    before = server.first.model(tokens[:, :start], use_cache=True)
    after = server.second.model(tokens[:, start:], past_key_values=before.past_key_values)
    logp = torch.cat([before.logits, after.logits], dim=1)[0, :-1].log_softmax(-1)
    return logp.gather(1, tokens[0, 1:, None])[len(ids) - 1 :, 0].numpy()


def test_new_requests_never_read_keys_and_values_of_older_weights(server: Any) -> None:
    """Also while a running request holds on to the cached blocks of the same prompt, and goes on filling new ones."""
    server.publish(server.first)
    shared = prompt(5, 300)

    async def run() -> Completion:
        client = EngineClient(server.url, timeout_s=60)
        options: dict[str, Any] = dict(temperature=1.0, stop_token_ids=[])
        await client.generate(shared, max_tokens=2, **options)
        running = asyncio.create_task(client.generate(shared, max_tokens=700, **options))
        await _some_steps(client)
        await asyncio.to_thread(server.publish, server.second)
        completion = await client.generate(shared, max_tokens=8, **options)
        assert not running.done(), "the other request must still hold its blocks"
        longer = shared + (await running).token_ids[:300].tolist()
        for ids in (longer, longer):  # the second time from the cache
            again = await client.generate(ids, max_tokens=8, **options)
            assert sampled_error(server.second, ids, again).max() <= LOGP_MAX
        await client.close()
        return completion

    completion = asyncio.run(run())
    assert sampled_error(server.second, shared, completion).max() <= LOGP_MAX


class _FlipsOneBit(NixlWriter):
    """A wire that damages one byte after the checksums were taken."""

    def write(self, *args: Any, **options: Any) -> None:
        self.staging[12345] ^= 1
        super().write(*args, **options)


def test_damaged_version_is_refused_by_name_and_the_old_weights_stay_whole(server: Any) -> None:
    version = server.publish(server.first, fresh=True)
    with pytest.raises(WeightSyncError, match=r"do not match their checksum in model\.embed_tokens\.weight.*") as error:
        server.publish(server.second, fresh=True, open_writer=_FlipsOneBit)
    assert server.url in str(error.value) and f"still serves version {version}" in str(error.value)
    assert server.control.weight_version() == version
    assert prompt_error(server, server.first) <= LOGP_MAX
    (completion,) = sample(server, [prompt(1)])
    assert set(completion.weight_version.tolist()) == {version}
    server.publish(server.second, fresh=True)
    assert prompt_error(server, server.second) <= LOGP_MAX


def test_layout_that_is_not_the_engines_model_is_refused_by_name(server: Any) -> None:
    slots = arena_layout(_specifications(server.first.weights))
    norm = "model.norm.weight"
    for changed, message in (
        ([s for s in slots if s.name != norm], rf"needs: {norm}"),
        ([*slots, TensorSlot("model.extra.weight", "float32", (1,), 0, 4)], r"does not have: model\.extra\.weight"),
        (
            [TensorSlot(s.name, s.dtype, (64,), s.offset, 256) if s.name == norm else s for s in slots],
            rf"{norm} is \[64\]",
        ),
    ):
        with pytest.raises(EngineError, match=message):
            server.control.open_arena(changed, ucx_tls="tcp,sm,self")


def _specifications(weights: Any) -> list[Any]:
    return [TensorSlot(name, "float32", tuple(weights[name].shape), 0, 0) for name in sorted(weights)]


def test_manifest_without_every_checksum_is_refused_by_name(server: Any) -> None:
    version = server.publish(server.first, fresh=True)
    with pytest.raises(WeightSyncError, match=r"without a checksum: lm_head|without a checksum: model\.embed_tokens"):
        server.control.commit(WeightManifest(99, 1, {}))
    assert server.control.weight_version() == version


def test_engine_that_cannot_start_says_why(server: Any, tmp_path: Path) -> None:
    model = server.log_path.parent / "first"
    argv, environment = engine_command(EngineConfig(), model, platform="cpu", port=server.port)
    log_path = tmp_path / "engine.log"
    with log_path.open("w") as log:
        process = subprocess.Popen(argv, env={**os.environ, **environment}, stdout=log, stderr=log)
    with pytest.raises(EngineError, match=r"ended with status 1 while starting; last lines of .*engine\.log") as error:
        wait_until_ready("http://127.0.0.1:9", process, log_path, 60)
    assert f"engine.port must be free on 127.0.0.1, got {server.port}" in str(error.value)


def test_killed_server_leaves_neither_process_nor_port(servers: dict[str, Any]) -> None:
    """Last in this file: it ends one of the two servers."""
    server = servers["own_head"]
    family = psutil.Process(server.process.pid).children(recursive=True)
    assert family, "vLLM runs its engine in a process of its own"
    os.kill(server.process.pid, signal.SIGKILL)
    server.process.wait()
    _, alive = psutil.wait_procs(family, timeout=5)
    assert not [child for child in alive if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    require_free_port("127.0.0.1", server.port)
    started = time.monotonic()
    with pytest.raises(EngineError, match=server.url):
        server.control.prompt_logprobs(PROBE)
    assert time.monotonic() - started < 5
