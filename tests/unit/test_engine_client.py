"""EngineClient and EngineControl against a scripted HTTP server: retries, deadlines, answers that do not fit."""

import asyncio
import json
import math
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest

from megatron_rl.engine.client import EngineClient, EngineControl
from megatron_rl.engine.errors import EngineError
from megatron_rl.records import WeightManifest
from megatron_rl.weight_sync.errors import WeightSyncError

Reply = tuple[int, Any] | str
"""(status, JSON body), or "drop" to close the connection, or "hang" to say nothing."""


def answer(**changes: Any) -> dict[str, Any]:
    """A good answer of three tokens, the first two of version 4."""
    choice = {
        "index": 0,
        "finish_reason": "stop",
        "token_ids": [5, 6, 2],
        "logprobs": {"content": [{"logprob": value} for value in (-0.5, -1.0, -2.0)]},
        "weight_versions": [{"version": "4", "start": 0, "end": 2}, {"version": "5", "start": 2, "end": 3}],
    }
    return {"choices": [choice | changes]}


class ScriptedServer:
    """Answers with the given replies in turn, the last one for ever."""

    def __init__(self) -> None:
        self.script: list[Reply] = []
        self.paths: list[str] = []
        self.bodies: list[Any] = []
        self.let_go = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                outer.paths.append(self.path)
                outer.bodies.append(json.loads(body or b"{}"))
                reply = outer.script.pop(0) if len(outer.script) > 1 else outer.script[0]
                if isinstance(reply, str):
                    if reply == "hang":
                        outer.let_go.wait(30)
                    self.close_connection = True
                    return
                data = json.dumps(reply[1]).encode()
                self.send_response(reply[0])
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.let_go.set()
        self._http.shutdown()
        self._http.server_close()


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    scripted = ScriptedServer()
    yield scripted
    scripted.close()


def generate(server: ScriptedServer, **options: Any) -> Any:
    async def run() -> Any:
        client = EngineClient(server.url, seed=0, **options)
        try:
            return await client.generate([1, 2, 3], max_tokens=8, temperature=0.7, stop_token_ids=[2])
        finally:
            await client.close()

    return asyncio.run(run())


def test_completion_carries_what_the_engine_said_and_the_request_what_was_asked(server: ScriptedServer) -> None:
    server.script = [(200, answer())]
    completion = generate(server)
    assert completion.token_ids.tolist() == [5, 6, 2] and completion.token_ids.dtype == np.int32
    assert completion.logp.tolist() == [-0.5, -1.0, -2.0] and completion.logp.dtype == np.float32
    assert completion.weight_version.tolist() == [4, 4, 5] and completion.weight_version.dtype == np.int32
    assert completion.finish_reason == "stop"
    sampling = server.bodies[0]["sampling_params"]
    assert server.bodies[0]["token_ids"] == [1, 2, 3]
    assert (sampling["max_tokens"], sampling["temperature"], sampling["stop_token_ids"]) == (8, 0.7, [2])
    assert sampling["ignore_eos"], "stop_token_ids alone may end a completion"


def test_tokens_before_the_first_update_have_version_0(server: ScriptedServer) -> None:
    server.script = [(200, answer(weight_versions=[{"version": "default", "start": 0, "end": 3}]))]
    assert generate(server).weight_version.tolist() == [0, 0, 0]


def test_lost_connections_and_server_errors_are_tried_again(server: ScriptedServer) -> None:
    server.script = [(503, {}), "drop", (500, {"error": {"message": "no"}}), (200, answer())]
    assert generate(server).token_ids.tolist() == [5, 6, 2]
    assert len(server.bodies) == 4


def test_refused_request_is_not_tried_again(server: ScriptedServer) -> None:
    server.script = [(400, {"error": {"message": "prompt too long"}})]
    with pytest.raises(EngineError, match=rf"{server.url} refused .* status 400: prompt too long"):
        generate(server)
    assert len(server.bodies) == 1


def test_error_after_the_last_retry_names_engine_and_cause(server: ScriptedServer) -> None:
    server.script = [(503, {"error": {"message": "busy"}})]
    with pytest.raises(EngineError, match=rf"{server.url} failed 3 times, at last with status 503: busy"):
        generate(server, retries=2)


def test_dead_engine_is_named(server: ScriptedServer) -> None:
    server.close()
    with pytest.raises(EngineError, match=rf"{server.url} failed 2 times, at last with ClientConnectorError"):
        generate(server, retries=1)


def test_deadline_holds_for_all_retries_together(server: ScriptedServer) -> None:
    server.script = [(503, {}), "hang"]
    with pytest.raises(EngineError, match=rf"{server.url} gave no answer within 1 s \(engine.request_timeout_s\)"):
        generate(server, timeout_s=1)


def test_log_probs_that_are_not_finite_become_nan(server: ScriptedServer) -> None:
    content = [{"logprob": value} for value in (-9999.0, None, -2.0)]
    server.script = [(200, answer(logprobs={"content": content}))]
    logp = generate(server).logp
    assert math.isnan(logp[0]) and math.isnan(logp[1]) and logp[2] == -2.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logprobs": None}, "one log-prob per token, got 0 for 3"),
        ({"logprobs": {"content": [{"logprob": -1.0}]}}, "one log-prob per token, got 1 for 3"),
        ({"weight_versions": None}, "every token's weight version"),
        ({"weight_versions": [{"version": "4", "start": 0, "end": 2}]}, "every token's weight version"),
        ({"finish_reason": "abort"}, "'abort' instead of stop or length"),
    ],
)
def test_answer_without_what_training_needs_is_an_error(
    server: ScriptedServer, changes: dict[str, Any], message: str
) -> None:
    server.script = [(200, answer(**changes))]
    with pytest.raises(EngineError, match=message):
        generate(server)


def test_engine_resumes_whatever_fails_during_a_commit(server: ScriptedServer) -> None:
    ok: Reply = (200, {})
    refused: Reply = (500, {"error": {"message": "bytes do not match"}})
    control = EngineControl(server.url, timeout_s=5)
    manifest = WeightManifest(7, 1, {"a": "00"})
    for failing in range(1, 4):
        server.paths.clear()
        server.script = [*[ok] * failing, refused, ok]
        with pytest.raises(WeightSyncError, match=rf"{server.url}.*bytes do not match"):
            control.commit(manifest)
        assert server.paths[0].startswith("/pause?mode=keep") and server.paths[-1] == "/resume"
        assert len(server.paths) == failing + 2
    control.close()


def test_commit_sends_the_manifest_between_pause_and_resume(server: ScriptedServer) -> None:
    control = EngineControl(server.url, timeout_s=5)
    server.script = [(200, {"success": True})]
    control.commit(WeightManifest(7, 1, {"a": "00"}))
    control.close()
    assert [path.split("?")[0] for path in server.paths] == [
        "/pause",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/reset_prefix_cache",
        "/resume",
    ]
    assert server.bodies[2] == {"update_info": {"version": 7, "buffer_index": 1, "checksums": {"a": "00"}}}
    assert server.bodies[3] == {"weight_version": "7"}


@pytest.mark.parametrize("call", [lambda c: c.prompt_logprobs([1, 2]), lambda c: c.weight_version()])
def test_control_names_an_engine_that_is_gone(server: ScriptedServer, call: Callable[[EngineControl], Any]) -> None:
    server.close()
    control = EngineControl(server.url, timeout_s=5)
    with pytest.raises(EngineError, match=rf"{server.url} cannot be reached"):
        call(control)
    with pytest.raises(EngineError, match=rf"{server.url} did not answer within 0.2 s"):
        control.wait_ready(0.2)
    control.close()
