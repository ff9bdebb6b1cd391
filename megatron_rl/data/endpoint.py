"""Asking a model behind any OpenAI-compatible API; connections, pauses and retries are the openai client's.

Invariant: whatever the server sends becomes a Completion or an EndpointError that names the address and a cure.
"""

import asyncio
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import Field, field_validator

from megatron_rl.config import ConfigError, ConfigModel, RunError
from megatron_rl.data.endpoint_answer import Completion, Message, api_message, check_choices, completion_of

__all__ = ["Completion", "Endpoint", "EndpointConfig", "EndpointError"]

_CONNECT_S = 10.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 8.0
_NUM_SHOWN = 10
_REFUSED_KEY = (401, 403)
_CURES = {
    429: "lower concurrency, or raise max_retries",
    413: "shorten the conversation, or serve the model with a longer context",
    400: "mend the conversation or the sampling options, or start the server with what the message asks for",
    422: "mend the conversation or the sampling options, or start the server with what the message asks for",
}


class EndpointConfig(ConfigModel):
    """A model behind an OpenAI-compatible API."""

    url: str
    """Base address of the API, such as http://127.0.0.1:8000/v1."""
    model: str = Field(min_length=1)
    """Name by which the endpoint serves the model."""
    api_key_env: str | None = None
    """Environment variable that holds the API key; null sends no key."""
    concurrency: int = Field(ge=1, le=1000, default=16)
    """Requests under way at the same time."""
    timeout_s: float = Field(gt=0, default=600.0)
    """Longest wait for one answer; an answer comes whole, after its last token."""
    max_retries: int = Field(ge=0, default=6)
    """Further tries after a lost connection, a time-out, status 429 or 5xx, or a malformed answer; pauses grow to 8 s,
    and a Retry-After of the server up to two minutes is kept to."""
    extra_body: dict[str, Any] = {}
    """Further fields of every request, such as top_p or chat_template_kwargs."""

    @field_validator("url")
    @classmethod
    def _is_web_address(cls, url: str) -> str:
        if not url.startswith(("http://", "https://")) or url.endswith(("/chat/completions", "/completions")):
            raise ValueError(f"must be the base address of an API, such as http://127.0.0.1:8000/v1, got {url!r}")
        return url.rstrip("/")


class EndpointError(RunError):
    """A request that failed for good."""

    def __init__(self, message: str, *, url: str, status: int | None = None, fatal: bool = False) -> None:
        """fatal: every other request would fail too, as when nothing listens there."""
        super().__init__(message)
        self.url, self.status, self.fatal = url, status, fatal


class Endpoint:
    """One model of one endpoint: `async with Endpoint(config) as endpoint: await endpoint.chat(...)`."""

    def __init__(self, config: EndpointConfig, *, name: str = "endpoint") -> None:
        """name: the config key of this endpoint, which errors use. ConfigError if its API key is not set."""
        self.config, self._name = config, name
        self._key = _api_key(config, name)
        self._slots = asyncio.Semaphore(config.concurrency)

    async def __aenter__(self) -> "Endpoint":
        import openai  # a second of imports that a command with nothing to ask need not wait for

        self._client = openai.AsyncOpenAI(
            base_url=self.config.url,
            api_key=self._key or "none",
            timeout=openai.Timeout(self.config.timeout_s, connect=min(_CONNECT_S, self.config.timeout_s)),
            max_retries=self.config.max_retries,
        )
        # The client takes what is left out from variables such as OPENAI_ORG_ID, which are none of this endpoint's.
        kept = () if self._key is None else ("Authorization",)
        unwanted = ("Authorization", "OpenAI-Organization", "OpenAI-Project")
        self._options: Any = {"headers": {header: openai.omit for header in unwanted if header not in kept}}
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        max_tokens: int,
        temperature: float,
        seed: int | None = None,
        prefill: str | None = None,
    ) -> Completion:
        """The next assistant turn. Arguments of tool calls in messages may be objects.

        prefill: text that the turn starts with, which the answer does not repeat; vLLM and SGLang continue it, other
        servers may not. EndpointError when all tries failed.
        """
        body = _chat_body(messages, tools, prefill)
        return await self._sample("/chat/completions", body, max_tokens, temperature, seed)

    async def complete(
        self, prompt_ids: Sequence[int], *, max_tokens: int, temperature: float, seed: int | None = None
    ) -> Completion:
        """What follows a prompt of token ids, which no chat template touches; special tokens stay in the text.

        EndpointError when all tries failed.
        """
        body = {"prompt": [int(token) for token in prompt_ids], "skip_special_tokens": False}
        return await self._sample("/completions", body, max_tokens, temperature, seed)

    async def check(self) -> None:
        """EndpointError, fatal, if nothing answers, the key is refused, or the model is not among the served ones.

        An endpoint that does not list its models passes.
        """
        try:
            served = await self.models()
        except EndpointError as error:
            if error.status not in (404, 405, 501):
                raise
            return
        if served is not None and self.config.model not in served:
            raise self._error(404, f"does not serve {self.config.model!r}", served)

    async def models(self) -> list[str] | None:
        """Names of the served models; None if the endpoint lists none."""
        listed = (await self._retried("get", "/models", None, _check_object)).get("data")
        if not isinstance(listed, list):
            return None
        return [str(model.get("id")) for model in listed if isinstance(model, dict)]

    async def prompt_text(self, messages: Sequence[Message], *, prefill: str | None = None) -> str | None:
        """The prompt that the server's chat template makes of messages, as chat() would send them.

        None where the server has no way to tell: vLLM's /tokenize and /detokenize lie beside /v1.
        """
        root = self.config.url.removesuffix("/v1")
        body = _chat_body(messages, (), prefill) | {"model": self.config.model}
        if options := self.config.extra_body.get("chat_template_kwargs"):
            body["chat_template_kwargs"] = options
        try:
            tokens = (await self._retried("post", f"{root}/tokenize", body, _check_object))["tokens"]
            ask = {"model": self.config.model, "tokens": tokens}
            return str((await self._retried("post", f"{root}/detokenize", ask, _check_object))["prompt"])
        except (EndpointError, KeyError):
            return None

    async def _sample(
        self, path: str, body: dict[str, Any], max_tokens: int, temperature: float, seed: int | None
    ) -> Completion:
        body |= {"model": self.config.model, "max_tokens": max_tokens, "temperature": temperature}
        if seed is not None:
            body["seed"] = seed
        return completion_of(await self._retried("post", path, self.config.extra_body | body, check_choices))

    async def _retried(
        self, method: str, path: str, body: dict[str, Any] | None, check: Callable[[Any], None]
    ) -> dict[str, Any]:
        """The answer's object. The client retries what fails; malformed answers of status 200 are retried here."""
        async with self._slots:
            return await self._try(method, path, body, check)

    async def _try(
        self, method: str, path: str, body: dict[str, Any] | None, check: Callable[[Any], None]
    ) -> dict[str, Any]:
        reason = ""
        for attempt in range(self.config.max_retries + 1):
            if attempt:
                await asyncio.sleep(min(_FIRST_PAUSE_S * 2 ** (attempt - 1), _LONGEST_PAUSE_S))
            text = await self._request(method, path, body)
            try:
                answer = json.loads(text)
                check(answer)
                return answer
            except (ValueError, RecursionError) as error:
                reason = f"{error}: {text[:80]!r}"
        tries = self.config.max_retries + 1
        raise self._error(200, f"gave a malformed answer {tries} times, at last {reason}", fatal=False)

    async def _request(self, method: str, path: str, body: dict[str, Any] | None) -> str:
        """The text of an answer with status 200."""
        import openai

        tries = self.config.max_retries + 1
        try:
            if method == "get":
                return await self._client.get(path, cast_to=str, options=self._options)
            return await self._client.post(path, cast_to=str, body=body, options=self._options)
        except openai.APITimeoutError:
            raise EndpointError(
                f"{self._name} {self.config.url} gave no answer within {self.config.timeout_s:g} s, {tries} times; "
                "raise timeout_s, or lower concurrency or max_tokens",
                url=self.config.url,
            ) from None
        except openai.APIConnectionError as error:
            cause = error.__cause__ or error
            raise EndpointError(
                f"{self._name} {self.config.url} must be reachable, got {type(cause).__name__}: {cause}, "
                f"{tries} times; start the server or correct {self._name}.url, then run the same command again",
                url=self.config.url,
                fatal=True,
            ) from error
        except openai.APIStatusError as error:
            raise await self._status_error(error.status_code, _message(error), path) from error

    async def _status_error(self, status: int, message: str, path: str) -> EndpointError:
        served = None
        if status == 404 and path != "/models":
            try:
                served = await self.models()
            except EndpointError:
                served = None
        return self._error(status, f"refused a request with status {status}: {message}", served)

    def _error(
        self, status: int, what: str, served: Sequence[str] | None = None, *, fatal: bool | None = None
    ) -> EndpointError:
        url, model = self.config.url, self.config.model
        if served is not None and model not in served:
            more = f" and {len(served) - _NUM_SHOWN} more" if len(served) > _NUM_SHOWN else ""
            cure = f"set {self._name}.model to one that is served: {', '.join(served[:_NUM_SHOWN]) or 'none'}{more}"
        elif status == 404:
            cure = f"correct {self._name}.url: it mostly ends in /v1"
        elif status in _REFUSED_KEY:
            cure = f"put a valid key into the environment variable that {self._name}.api_key_env names"
        else:
            cure = _CURES.get(status, "look at the server's log")
        is_fatal = status in (404, *_REFUSED_KEY) if fatal is None else fatal
        return EndpointError(f"{self._name} {url} {what}; {cure}", url=url, status=status, fatal=is_fatal)


def _api_key(config: EndpointConfig, name: str) -> str | None:
    if config.api_key_env is None:
        return None
    key = os.environ.get(config.api_key_env, "")
    if not key:
        raise ConfigError(
            f"{name}.api_key_env must name a set environment variable, got {config.api_key_env}, which is not set; "
            "export it, or leave the option out for an endpoint without keys"
        )
    return key


def _chat_body(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], prefill: str | None) -> dict[str, Any]:
    body: dict[str, Any] = {"messages": [api_message(message) for message in messages]}
    if tools:
        body["tools"] = list(tools)
    if prefill is not None:
        body["messages"].append({"role": "assistant", "content": prefill})
        body |= {"continue_final_message": True, "add_generation_prompt": False}
    return body


def _check_object(answer: Any) -> None:
    if not isinstance(answer, dict):
        raise ValueError("an answer must be an object")


def _message(error: Any) -> str:
    """The server's own message in an error body, or the body, on one line."""
    body = error.body
    message = body.get("message") if isinstance(body, dict) else None
    return " ".join(str(message or error.response.text or "no message").split())[:300]
