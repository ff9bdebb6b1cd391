"""An OpenAI-compatible endpoint whose answers a test writes; loaded with runpy, since tests are no package."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Script = Callable[[dict[str, Any]], Any]
"""Body of a request -> a web.Response, a JSON object to answer with, or seconds to wait before an empty answer."""
MODEL = "scripted"


def chat_answer(content: str | None, *, finish_reason: str = "stop", tokens: int = 5, **message: Any) -> dict[str, Any]:
    """An answer of /chat/completions; message: reasoning, reasoning_content, tool_calls."""
    choice = {
        "index": 0,
        "finish_reason": finish_reason,
        "message": {"role": "assistant", "content": content, **message},
    }
    return {"id": "1", "object": "chat.completion", "choices": [choice], "usage": {"completion_tokens": tokens}}


def text_answer(text: str, *, finish_reason: str = "stop", tokens: int = 5) -> dict[str, Any]:
    """An answer of /completions."""
    return {
        "choices": [{"index": 0, "finish_reason": finish_reason, "text": text}],
        "usage": {"completion_tokens": tokens},
    }


@dataclass
class Asked:
    """One request that came in."""

    path: str
    body: dict[str, Any] | None
    headers: dict[str, str]


@dataclass
class ScriptedEndpoint:
    """`with ScriptedEndpoint(script) as endpoint: ... endpoint.url`. Serves from a thread of its own."""

    script: Script
    models: list[str] | None = field(default_factory=lambda: [MODEL])
    """None: /models is missing."""
    asked: list[Asked] = field(default_factory=list)
    """Every request but those for /models."""
    gather: int = 0
    """Answers wait until so many requests are under way, or 5 s, and a moment longer: for one too many to come."""
    most_at_once: int = 0
    _now: int = 0

    def __enter__(self) -> "ScriptedEndpoint":
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.port = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)
        self.url = f"http://127.0.0.1:{self.port}/v1"
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _stop(self) -> None:
        """Closes the port and ends handlers whose client has gone."""
        await self._runner.cleanup()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    @property
    def bodies(self) -> list[dict[str, Any]]:
        """Bodies of the requests, in the order they came."""
        return [request.body for request in self.asked if request.body is not None]

    async def _start(self) -> int:
        app = web.Application()
        app.router.add_get("/v1/models", self._list_models)
        app.router.add_post("/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return self._runner.addresses[0][1]

    async def _list_models(self, request: web.Request) -> web.Response:
        if self.models is None:
            return web.Response(status=404)
        return web.json_response({"object": "list", "data": [{"id": name} for name in self.models]})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(Asked(request.path, body, dict(request.headers)))
        self._now += 1
        self.most_at_once = max(self.most_at_once, self._now)
        try:
            answer = self.script({**body, "path": request.path})
            if isinstance(answer, float):
                with suppress(asyncio.CancelledError):
                    await asyncio.sleep(answer)
                return web.Response()
            for _ in range(500):
                if self.most_at_once >= self.gather:
                    break
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.03 if self.gather else 0)
            return answer if isinstance(answer, web.StreamResponse) else web.json_response(answer)
        finally:
            self._now -= 1
