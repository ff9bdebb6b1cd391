"""What is checked before an engine starts, and what is said when it does not come up."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl.config import ConfigError
from megatron_rl.engine.config import EngineConfig
from megatron_rl.engine.errors import EngineError
from megatron_rl.engine.server import (
    engine_command,
    free_port,
    require_free_port,
    server_arguments,
    server_environment,
    wait_until_ready,
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.7", "::", "engine.example"])
def test_server_listens_on_loopback_unless_it_is_told_that_others_may_reach_it(model: Path, host: str) -> None:
    with pytest.raises(ConfigError, match=rf"engine.host must be a loopback address, got {host}.*allow_remote"):
        engine_command(EngineConfig(host=host), model, platform="cpu", port=1)
    engine_command(EngineConfig(host=host, allow_remote=True), model, platform="cpu", port=1)
    for loopback in ("127.0.0.1", "127.8.8.8", "::1", "localhost"):
        engine_command(EngineConfig(host=loopback), model, platform="cpu", port=1)


def test_folder_that_is_no_model_and_tensor_parallelism_are_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"folder with a config\.json, got .*missing"):
        engine_command(EngineConfig(), tmp_path / "missing", platform="cpu", port=1)
    with pytest.raises(ConfigError, match=r"engine\.tensor_parallel must be 1 so far, got 2"):
        engine_command(EngineConfig(tensor_parallel=2), model, platform="cuda", port=1)


def test_command_carries_the_whole_config(model: Path) -> None:
    config = EngineConfig(max_num_seqs=7, dtype="float32", vllm_args=["--block-size", "32"])
    argv, environment = engine_command(config, model, platform="cpu", port=8123, seed=5)
    assert EngineConfig.model_validate_json(argv[argv.index("--config") + 1]) == config
    assert argv[argv.index("--port") + 1] == "8123" and argv[argv.index("--seed") + 1] == "5"
    assert environment == server_environment(config, "cpu")


def test_cuda_gets_no_cpu_settings(model: Path) -> None:
    arguments = server_arguments(EngineConfig(), model, platform="cuda", port=1, seed=0)
    assert "--enforce-eager" not in arguments and "--gpu-memory-utilization" in arguments
    assert not any(name.startswith(("OMP_", "VLLM_CPU")) for name in server_environment(EngineConfig(), "cuda"))


def test_port_in_use_is_found_before_anything_starts() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"engine.port must be free on 127.0.0.1, got {port} .*engine.port=0"):
            require_free_port("127.0.0.1", port)
    require_free_port("127.0.0.1", port)
    require_free_port("127.0.0.1", free_port())


def start(code: str, log_path: Path) -> subprocess.Popen[bytes]:
    with log_path.open("w") as log:
        return subprocess.Popen([sys.executable, "-c", code], stdout=log, stderr=log)


def test_server_that_dies_is_reported_with_the_end_of_its_log(tmp_path: Path) -> None:
    log_path = tmp_path / "engine.log"
    process = start("for i in range(30): print(f'line {i}')\nraise SystemExit(3)", log_path)
    with pytest.raises(EngineError, match=r"http://127\.0\.0\.1:9 ended with status 3 while starting") as error:
        wait_until_ready("http://127.0.0.1:9", process, log_path, 60)
    message = str(error.value)
    assert (
        str(log_path) in message and "| line 29" in message and "| line 10" in message and "| line 9\n" not in message
    )


def test_server_that_never_answers_is_given_up_at_the_deadline(tmp_path: Path) -> None:
    log_path = tmp_path / "engine.log"
    process = start("import time; print('loading', flush=True); time.sleep(60)", log_path)
    try:
        with pytest.raises(EngineError, match=r"not ready after 1 s \(engine\.start_timeout_s\)"):
            wait_until_ready("http://127.0.0.1:9", process, log_path, 1)
    finally:
        process.kill()
        process.wait()
