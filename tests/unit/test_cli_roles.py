"""Roles of an RL run that is spread over machines: what each is started with, and what it refuses."""

import json
import os
import runpy
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.cli import launch
from megatron_rl.cli.addresses import listening_address
from megatron_rl.cli.main import app
from megatron_rl.cli.runs import RlRun
from megatron_rl.config import ConfigError
from megatron_rl.config.load import load_config

INPUT = runpy.run_path(str(Path(__file__).parents[1] / "cli_input.py"))
rl = INPUT["rl"]
URLS = "engine.urls=[http://127.0.0.1:8000, http://127.0.0.1:8100]"


def test_an_engine_by_hand_becomes_the_one_its_run_would_start(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(os, "execve", lambda *arguments: started.append(arguments))
    config = rl(tiny, tmp_path, engine={"dtype": "float32", "max_num_seqs": 7})
    app(["engine", config, "--index", "1", URLS, "run.seed=5"], standalone_mode=False)
    ((program, argv, environment),) = started
    options = dict(zip(argv[3::2], argv[4::2], strict=True))
    assert program == argv[0] and argv[2] == "megatron_rl.engine.server"
    assert (options["--port"], options["--seed"], options["--model"]) == ("8100", "6", str(tiny / "model"))
    assert json.loads(options["--config"])["max_num_seqs"] == 7
    assert environment["VLLM_SERVER_DEV_MODE"] == "1" and environment["PATH"] == os.environ["PATH"]


def test_an_engine_that_could_not_serve_is_refused(tiny: Path, tmp_path: Path, error_of: Callable[..., str]) -> None:
    config = rl(tiny, tmp_path)
    for overrides, words in (
        ([], "needs engine.urls, got none"),
        ([URLS, "--index", "2"], "--index must count the 2 engine.urls from 0, got 2"),
        (["engine.urls=[http://node-1]"], "http://HOST:PORT"),
        (["engine.urls=[http://node-1:99999]"], "http://HOST:PORT"),
        (["engine.urls=[http://node-1:8000]"], "engine.host=0.0.0.0"),
        (["engine.urls=[http://node-1:8000]", "engine.host=0.0.0.0"], "engine.allow_remote"),
    ):
        assert words in error_of("engine", config, *overrides)


def test_an_orchestrator_without_addresses_is_refused(tiny: Path, tmp_path: Path, error_of: Callable[..., str]) -> None:
    config = rl(tiny, tmp_path)
    for overrides in ([], [URLS], ["orchestrator.address=tcp://127.0.0.1:5555"]):
        assert "needs orchestrator.address and engine.urls" in error_of("orchestrator", config, *overrides)
    assert "tcp://HOST:PORT" in error_of("orchestrator", config, URLS, "orchestrator.address=node-1")


def test_a_host_name_is_listened_on_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = {"node-1": "10.0.0.7", "debian": "127.0.1.1", "localhost": "127.0.0.1", "10.0.0.8": "10.0.0.8"}

    def resolve(name: str) -> str:
        if name not in numbers:
            raise OSError(1, "Name or service not known")
        return numbers[name]

    monkeypatch.setattr(socket, "gethostbyname", resolve)
    for address, listened_on in (
        ("tcp://node-1:5555", "tcp://10.0.0.7:5555"),
        ("tcp://localhost:5555", "tcp://127.0.0.1:5555"),
        ("tcp://10.0.0.8:5555", "tcp://10.0.0.8:5555"),
        ("tcp://*:5555", "tcp://*:5555"),
        ("tcp://[::1]:5555", "tcp://[::1]:5555"),
        ("ipc:///tmp/socket", "ipc:///tmp/socket"),
    ):
        assert listening_address(address) == listened_on
    with pytest.raises(ConfigError, match=r"trainer reaches this machine, got tcp://debian:5555, which is 127.0.1.1"):
        listening_address("tcp://debian:5555")
    with pytest.raises(ConfigError, match=r"must name this machine, got tcp://elsewhere:5555 \(Name or service"):
        listening_address("tcp://elsewhere:5555")


@pytest.mark.parametrize(("visible", "expected"), [(None, ["2", "3"]), ("4,5,6,7", ["6", "7"])])
def test_engines_of_one_machine_take_the_gpus_after_the_trainers(
    visible: str | None, expected: list[str], tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    overrides = ["run.platform=cuda", "run.processes=2", "engine.count=2"]
    run = launch.with_addresses(load_config(rl(tiny, tmp_path), RlRun, overrides))
    parts = launch.engine_parts(run, tmp_path)
    assert [part.env["CUDA_VISIBLE_DEVICES"] for part in parts] == expected


def test_more_ranks_and_engines_than_gpus_are_refused(
    tiny: Path, tmp_path: Path, error_of: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: object())
    overrides = ["run.platform=cuda", "run.processes=2", "engine.count=3"]
    error = error_of("rl", rl(tiny, tmp_path), *overrides)
    assert "run.processes + engine.count must be at most the GPUs of this machine, got 2 + 3 for 4" in error
