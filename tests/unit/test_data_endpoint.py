"""What an endpoint may do to a request, and what the caller is told: against a real HTTP server with a script."""

import asyncio
import re
import runpy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from pydantic import ValidationError

from megatron_rl.config import ConfigError
from megatron_rl.data.endpoint import Completion, Endpoint, EndpointConfig, EndpointError

SCRIPTED = runpy.run_path(str(Path(__file__).parents[1] / "scripted_endpoint.py"))
ScriptedEndpoint, chat_answer, text_answer = (
    SCRIPTED[name] for name in ("ScriptedEndpoint", "chat_answer", "text_answer")
)
QUESTION = [{"role": "user", "content": "?"}]


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of our own retries and of the client's; a Retry-After is kept to nevertheless."""
    import openai._base_client as client

    monkeypatch.setattr("megatron_rl.data.endpoint._FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(client, "INITIAL_RETRY_DELAY", 0.001)


def config(server: Any, **changes: Any) -> EndpointConfig:
    return EndpointConfig(**{"url": server.url, "model": "scripted", "max_retries": 2, **changes})


def ask(settings: EndpointConfig, count: int = 1, **options: Any) -> list[Completion]:
    """Asks the same thing several times at once."""

    async def run() -> list[Completion]:
        async with Endpoint(settings, name="teacher") as endpoint:
            arguments = {"max_tokens": 7, "temperature": 0.5} | options
            return await asyncio.gather(*(endpoint.chat(QUESTION, **arguments) for _ in range(count)))

    return asyncio.run(run())


def failure(settings: EndpointConfig, call: Callable[[Endpoint], Any]) -> EndpointError:
    async def run() -> None:
        async with Endpoint(settings, name="teacher") as endpoint:
            await call(endpoint)

    with pytest.raises(EndpointError) as error:
        asyncio.run(run())
    assert "\n" not in str(error.value)
    return error.value


def chat(endpoint: Endpoint) -> Any:
    return endpoint.chat(QUESTION, max_tokens=7, temperature=0.5)


def test_a_request_holds_what_was_asked_for_and_no_more() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    call = {"function": {"name": "f", "arguments": {"ä": 1}}}
    history = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "reasoning_content": "weil", "tool_calls": [call]},
        {"role": "tool", "content": "b", "tool_call_id": "call_0"},
    ]

    async def run(settings: EndpointConfig) -> None:
        async with Endpoint(settings) as endpoint:
            await endpoint.chat(history, tools=tools, max_tokens=7, temperature=0.5, seed=3, prefill="<think>\nAlso,")

    with ScriptedEndpoint(lambda _: chat_answer("x")) as server:
        asyncio.run(run(config(server, extra_body={"top_p": 0.9, "temperature": 9})))
    (request,) = server.asked
    assert request.path == "/v1/chat/completions"
    arguments = {"name": "f", "arguments": '{"ä": 1}'}
    turn = {"role": "assistant", "content": "", "reasoning_content": "weil", "reasoning": "weil"}
    assert request.body == {
        "model": "scripted",
        "messages": [
            history[0],
            turn | {"tool_calls": [{"id": "call_0", "type": "function", "function": arguments}]},
            history[2],
            {"role": "assistant", "content": "<think>\nAlso,"},
        ],
        "tools": tools,
        "max_tokens": 7,
        "temperature": 0.5,
        "seed": 3,
        "top_p": 0.9,
        "continue_final_message": True,
        "add_generation_prompt": False,
    }


def test_a_key_is_sent_only_where_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_ADMIN_KEY", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID"):
        monkeypatch.setenv(name, "not-for-this-endpoint")
    with ScriptedEndpoint(lambda _: chat_answer("x")) as server:
        ask(config(server))
        assert "not-for-this-endpoint" not in str(server.asked[-1].headers)
        assert "Authorization" not in server.asked[-1].headers
        monkeypatch.setenv("TEACHER_KEY", "mine")
        ask(config(server, api_key_env="TEACHER_KEY"))
        assert server.asked[-1].headers["Authorization"] == "Bearer mine"
        monkeypatch.delenv("TEACHER_KEY")
        with pytest.raises(ConfigError, match=r"teacher\.api_key_env .* got TEACHER_KEY, which is not set; export it"):
            ask(config(server, api_key_env="TEACHER_KEY"))


def test_answers_of_every_server_become_one_kind_of_record() -> None:
    call = {"id": "7", "type": "function", "function": {"name": "f", "arguments": '{"a": 1'}}
    answers = [
        chat_answer("4", reasoning="two and two", tokens=9),
        chat_answer("4", reasoning_content="two and two", finish_reason="length"),
        chat_answer(None, tool_calls=[call, {"function": None}, 3], finish_reason="tool_calls"),
        {"choices": [{"message": {"content": "half \ud83d", "tool_calls": None}, "finish_reason": None}]},
    ]
    with ScriptedEndpoint(lambda _: answers[len(server.asked) - 1]) as server:
        first, second, third, fourth = (ask(config(server))[0] for _ in answers)
    assert first == Completion("4", "two and two", [], "stop", 9)
    assert (second.reasoning, second.finish_reason) == ("two and two", "length")
    empty = {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
    assert (third.text, third.tool_calls) == ("", [call, empty, empty])
    assert fourth == Completion("half ?", None, [], "None", 0)


def test_what_passes_by_is_tried_again_and_a_pause_the_server_asks_for_is_kept() -> None:
    faults = [
        web.Response(status=429, headers={"Retry-After": "0.4"}, text="too many"),
        web.Response(status=503),
        web.Response(text='{"choices": [{"message": {"con', content_type="application/json"),
        web.Response(text="<html>proxy</html>", content_type="text/html"),
        web.json_response({"choices": []}),
        0.5,  # a time-out
    ]
    answers = [*faults, chat_answer("at last")]
    with ScriptedEndpoint(lambda _: answers[len(server.asked) - 1]) as server:
        started = time.monotonic()
        (completion,) = ask(config(server, max_retries=5, timeout_s=0.2))
        assert completion.text == "at last" and len(server.asked) == len(answers)
        assert time.monotonic() - started >= 0.4 + 0.2


@pytest.mark.parametrize(
    ("answer", "tries", "status", "fatal", "message"),
    [
        (lambda: web.Response(status=429, text="slow down"), 3, 429, False, "429: slow down; lower concurrency"),
        (lambda: web.Response(status=500), 3, 500, False, "look at the server's log"),
        (lambda: 0.5, 3, None, False, "no answer within 0.2 s, 3 times; raise timeout_s"),
        (
            lambda: web.json_response({"error": {"message": "context is\n4096"}}, status=400),
            1,
            400,
            False,
            "status 400: context is 4096; mend the conversation",
        ),
        (lambda: web.Response(status=401), 1, 401, True, r"put a valid key .* teacher\.api_key_env names"),
        (lambda: web.Response(text='{"a', content_type="application/json"), 3, 200, False, r"malformed .* '\{\"a'"),
        (lambda: web.Response(status=404), 1, 404, True, r"correct teacher\.url: it mostly ends in /v1"),
    ],
)
def test_what_does_not_pass_by_names_the_address_and_the_cure(
    answer: Callable[[], Any], tries: int, status: int | None, fatal: bool, message: str
) -> None:
    with ScriptedEndpoint(lambda _: answer()) as server:
        error = failure(config(server, timeout_s=0.2), chat)
    assert len(server.asked) == tries
    assert (error.status, error.fatal, error.url) == (status, fatal, server.url)
    assert error.args[0].startswith(f"teacher {server.url} ")
    assert re.search(message, str(error)), str(error)


def test_an_endpoint_that_is_down_and_an_unknown_model_are_told_before_anything_is_asked() -> None:
    with ScriptedEndpoint(lambda _: chat_answer("x"), models=[f"m{i}" for i in range(12)]) as server:
        error = failure(config(server, model="n"), lambda endpoint: endpoint.check())
        assert error.fatal and "does not serve 'n'; set teacher.model to one that is served: m0, m1" in str(error)
        assert str(error).endswith("m9 and 2 more") and not server.asked
    down = failure(config(server, max_retries=1), lambda endpoint: endpoint.check())
    assert down.fatal and down.status is None and server.url in str(down)
    assert "2 times; start the server or correct teacher.url, then run the same command again" in str(down)
    with ScriptedEndpoint(lambda _: web.Response(status=404), models=["other"]) as server:
        error = failure(config(server), chat)
        assert "status 404" in str(error) and "one that is served: other" in str(error)

    async def check(settings: EndpointConfig) -> None:
        async with Endpoint(settings) as endpoint:
            await endpoint.check()

    with ScriptedEndpoint(lambda _: chat_answer("x"), models=None) as server:
        asyncio.run(check(config(server)))  # an endpoint that lists no models passes


def test_no_more_requests_than_allowed_are_under_way() -> None:
    with ScriptedEndpoint(lambda _: chat_answer("x"), gather=3) as server:
        assert len(ask(config(server, concurrency=3), count=12)) == 12
    assert server.most_at_once == 3


@pytest.mark.parametrize("url", ["127.0.0.1:8000/v1", "", "http://host/v1/chat/completions"])
def test_an_address_that_is_no_base_address_is_refused(url: str) -> None:
    with pytest.raises(
        ValidationError, match=r"must be the base address of an API, such as http://127\.0\.0\.1:8000/v1"
    ):
        EndpointConfig(url=url, model="m")
