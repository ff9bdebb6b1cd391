"""Asking an engine over HTTP: EngineClient (async) samples, EngineControl (sync) scores, and changes weights.

Invariant: versions come with the tokens, noted by the engine in the step that computed them; they are never read
before or after a request.
"""

import asyncio
import json
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
import httpx
import msgspec
import numpy as np

from megatron_rl.engine.errors import EngineError
from megatron_rl.engine.records import INITIAL_VERSION, Completion
from megatron_rl.engine.server import answers
from megatron_rl.records import TensorSlot, WeightManifest
from megatron_rl.weight_sync.errors import WeightSyncError
from megatron_rl.weight_sync.transport import ArenaAddress

_GENERATE = "/inference/v1/generate"
_LOWEST_LOGP = -9999.0
"""vLLM sends minus infinity as this."""
_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 5.0


class EngineClient:
    """Token ids in, token ids with log-probs and versions out."""

    def __init__(self, url: str, *, timeout_s: float = 600.0, retries: int = 4, seed: int | None = None) -> None:
        """timeout_s bounds one request with all its retries; seed is that of the pauses between them."""
        self.url = url.rstrip("/")
        self._timeout_s, self._retries = timeout_s, retries
        self._random = random.Random(seed)
        self._session: aiohttp.ClientSession | None = None

    async def generate(
        self, prompt_ids: Sequence[int], *, max_tokens: int, temperature: float, stop_token_ids: Sequence[int]
    ) -> Completion:
        """One continuation of up to max_tokens, ended by any of stop_token_ids and nothing else; EngineError if not.

        A group's rollouts are requests of their own: vLLM would split a request for several anyway.
        """
        sampling = {
            "max_tokens": max_tokens,
            "temperature": temperature,
            "stop_token_ids": [int(token) for token in stop_token_ids],
            "ignore_eos": True,
            "logprobs": 0,
            "detokenize": False,
        }
        answer = await self._post({"token_ids": [int(token) for token in prompt_ids], "sampling_params": sampling})
        return _completion(answer["choices"][0], self.url)

    async def prompt_logprobs(self, token_ids: Sequence[int]) -> np.ndarray:
        """Log-probs of token_ids given what precedes each, at temperature 1. float32 [T]; entry 0 is NaN.

        Computed anew every time: vLLM does not read its prefix cache for such requests.
        """
        return _prompt_logp(await self._post(_prompt_logp_request(token_ids)), token_ids, self.url)

    async def ready(self) -> bool:
        """Whether the engine answers now."""
        try:
            async with self._open_session().get(f"{self.url}/health", timeout=aiohttp.ClientTimeout(5)) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def close(self) -> None:
        """Closes the connections."""
        if self._session is not None:
            await self._session.close()

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        return self._session

    async def _post(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The engine's answer, with retries on lost connections and on statuses from 500 up."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._post_with_retries(body)
        except TimeoutError as error:
            raise EngineError(
                f"engine {self.url} gave no answer within {self._timeout_s:g} s (engine.request_timeout_s); it is "
                "overloaded, paused or stuck: look at its log"
            ) from error

    async def _post_with_retries(self, body: Mapping[str, Any]) -> dict[str, Any]:
        failure = ""
        for attempt in range(self._retries + 1):
            if attempt:
                await asyncio.sleep(_pause_s(attempt, self._random))
            try:
                async with self._open_session().post(
                    self.url + _GENERATE, json=body, timeout=aiohttp.ClientTimeout(total=None)
                ) as response:
                    if response.status == 200:
                        return msgspec.json.decode(await response.read())
                    failure = f"status {response.status}: {_message(await response.text())}"
                    if response.status < 500:
                        raise EngineError(f"engine {self.url} refused a request with {failure}")
            except (aiohttp.ClientError, msgspec.DecodeError) as error:
                failure = f"{type(error).__name__}: {error}"
        raise EngineError(f"engine {self.url} failed {self._retries + 1} times, at last with {failure}")


class EngineControl:
    """What the trainer needs of an engine; implements weight_sync's EngineTarget. One thread at a time."""

    def __init__(self, url: str, *, timeout_s: float = 600.0) -> None:
        self.url = url.rstrip("/")
        # vLLM drops the connection after it has answered with status 500: no call may depend on the one before.
        limits = httpx.Limits(max_keepalive_connections=0)
        self._http = httpx.Client(base_url=self.url, timeout=timeout_s, limits=limits)

    def wait_ready(self, timeout_s: float) -> None:
        """Returns when the engine answers; EngineError after timeout_s."""
        deadline = time.monotonic() + timeout_s
        while not answers(self.url):
            if time.monotonic() > deadline:
                raise EngineError(
                    f"engine {self.url} did not answer within {timeout_s:g} s (weight_sync.connect_timeout_s)"
                )
            time.sleep(0.1)

    def open_arena(self, slots: Sequence[TensorSlot], *, ucx_tls: str) -> ArenaAddress:
        """Has the engine's worker open a fresh arena. EngineError if the layout does not fit its model."""
        init_info = {"slots": msgspec.to_builtins(list(slots)), "ucx_tls": ucx_tls}
        self._post("/init_weight_transfer_engine", {"init_info": init_info})
        answer = self._post("/collective_rpc", {"method": "weight_arena_address"})
        return msgspec.convert(answer["results"][0], ArenaAddress)

    def commit(self, manifest: WeightManifest) -> None:
        """Pause, verify, load, empty the prefix cache, resume; running requests go on with the new weights.

        WeightSyncError says what the engine serves if it did not take the version.
        """
        self._post("/pause", params={"mode": "keep", "clear_cache": "false"})
        try:
            self._post("/start_weight_update")
            self._post("/update_weights", {"update_info": msgspec.to_builtins(manifest)})
            self._post("/finish_weight_update", {"weight_version": str(manifest.version)})
            if not self._post("/reset_prefix_cache").get("success"):
                raise EngineError(f"engine {self.url} could not empty its prefix cache after a weight update")
        except EngineError as error:
            raise WeightSyncError(str(error)) from error
        finally:
            self._post("/resume")

    def weight_version(self) -> int:
        """The version served now: for people and tests. A token's version comes with the token."""
        answer = self._checked(self._request("GET", "/weight_info"), "/weight_info")
        return _version(answer["weight_version"])

    def prompt_logprobs(self, token_ids: Sequence[int]) -> np.ndarray:
        """As EngineClient.prompt_logprobs. float32 [T]; entry 0 is NaN."""
        return _prompt_logp(self._post(_GENERATE, _prompt_logp_request(token_ids)), token_ids, self.url)

    def close(self) -> None:
        """Closes the connection."""
        self._http.close()

    def _post(self, path: str, body: Mapping[str, Any] | None = None, **options: Any) -> dict[str, Any]:
        return self._checked(self._request("POST", path, json=body, **options), path)

    def _request(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            return self._http.request(method, path, **options)
        except httpx.TimeoutException as error:
            raise EngineError(
                f"engine {self.url} did not answer {path} within {self._http.timeout.read:g} s"
            ) from error
        except httpx.HTTPError as error:
            raise EngineError(f"engine {self.url} cannot be reached ({type(error).__name__}: {error})") from error

    def _checked(self, response: httpx.Response, path: str) -> dict[str, Any]:
        if response.status_code != 200:
            raise EngineError(f"engine {self.url}{path} failed: {_message(response.text)}")
        return response.json() if response.content else {}


def _completion(choice: Mapping[str, Any], url: str) -> Completion:
    finish_reason = choice["finish_reason"]
    if finish_reason not in ("stop", "length"):
        raise EngineError(f"engine {url} ended a completion with {finish_reason!r} instead of stop or length")
    token_ids = np.array(choice["token_ids"], dtype=np.int32)
    content = (choice.get("logprobs") or {}).get("content")
    if content is None or len(content) != len(token_ids):
        raise EngineError(
            f"engine {url} must give one log-prob per token, got {0 if content is None else len(content)} for "
            f"{len(token_ids)} tokens"
        )
    return Completion(
        token_ids=token_ids,
        logp=_finite([entry["logprob"] for entry in content]),
        weight_version=_versions(choice.get("weight_versions"), len(token_ids), url),
        finish_reason=finish_reason,
    )


def _versions(spans: Sequence[Mapping[str, Any]] | None, num_tokens: int, url: str) -> np.ndarray:
    """Spans of (version, start, end) as one version per token. int32 [T]"""
    versions = np.full(num_tokens, -1, dtype=np.int32)
    for span in spans or ():
        versions[span["start"] : span["end"]] = _version(span["version"])
    if (versions < 0).any():
        raise EngineError(f"engine {url} must give every token's weight version, got {spans} for {num_tokens} tokens")
    return versions


def _version(label: str) -> int:
    return INITIAL_VERSION if label == "default" else int(label)


def _prompt_logp_request(token_ids: Sequence[int]) -> dict[str, Any]:
    sampling = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "detokenize": False}
    return {"token_ids": [int(token) for token in token_ids], "sampling_params": sampling}


def _prompt_logp(answer: Mapping[str, Any], token_ids: Sequence[int], url: str) -> np.ndarray:
    entries = answer.get("prompt_logprobs")
    if entries is None or len(entries) != len(token_ids):
        raise EngineError(
            f"engine {url} must give one log-prob per prompt token, got {0 if entries is None else len(entries)} for "
            f"{len(token_ids)} tokens"
        )
    rest = zip(entries[1:], token_ids[1:], strict=True)
    return _finite([float("nan"), *(entry[str(int(token))]["logprob"] for entry, token in rest)])


def _finite(logp: Sequence[float | None]) -> np.ndarray:
    """float32 [T] with NaN for everything that is not a finite log-prob."""
    values = np.array([np.nan if value is None else value for value in logp], dtype=np.float32)
    values[~np.isfinite(values) | (values <= _LOWEST_LOGP)] = np.nan
    return values


def _pause_s(attempt: int, generator: random.Random) -> float:
    """Exponential back-off with full jitter."""
    return generator.uniform(0, min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**attempt))


def _message(text: str) -> str:
    """vLLM's own message in an error body, or the body."""
    try:
        return json.loads(text)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return text[:500] or "no message"
