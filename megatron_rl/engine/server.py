"""Starting an engine: python -m megatron_rl.engine.server --model FOLDER --platform cpu --port 8000 [--config JSON].

The process runs vLLM's OpenAI server with what this house adds to it: token ids in and out with the version of every
token, weights from the trainer, float32 logits. vLLM is imported only when the server runs, never by its callers.
"""

import argparse
import ipaddress
import json
import os
import random
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, Protocol

from megatron_rl.config import ConfigError
from megatron_rl.engine.config import EngineConfig
from megatron_rl.engine.errors import EngineError
from megatron_rl.engine.lifetime import SERVER_PID

PlatformName = Literal["cpu", "cuda"]
_LOG_LINES = 20


class Process(Protocol):
    """A started server."""

    def poll(self) -> int | None:
        """None while it runs, then its exit status."""
        ...


def engine_command(
    config: EngineConfig, model_path: str | Path, *, platform: PlatformName, port: int, seed: int = 0
) -> tuple[list[str], dict[str, str]]:
    """(argv, environment to add) of one engine. ConfigError if it could not start or would be unsafe."""
    check_engine(config, Path(model_path))
    ours = server_arguments(config.model_copy(update={"vllm_args": []}), model_path, platform=platform, port=0, seed=0)
    given = [argument.split("=")[0].replace("_", "-") for argument in config.vllm_args]
    if twice := sorted({argument for argument in given if argument.startswith("--")} & set(ours)):
        raise ConfigError(
            f"engine.vllm_args must not repeat what an engine is started with anyway, got {', '.join(twice)}; "
            "use the option of engine with that meaning"
        )
    argv = [sys.executable, "-m", "megatron_rl.engine.server", "--model", str(model_path), "--platform", platform]
    argv += ["--port", str(port), "--seed", str(seed), "--config", config.model_dump_json(exclude_defaults=True)]
    return argv, server_environment(config, platform)


def server_environment(config: EngineConfig, platform: PlatformName) -> dict[str, str]:
    """What vLLM and OpenMP read from the environment; must be set before either is loaded."""
    environment = {
        "VLLM_SERVER_DEV_MODE": "1",  # pause, resume and weight updates over HTTP
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_COLOR": "0",
    }
    if platform == "cpu":
        environment |= {
            "OMP_NUM_THREADS": str(config.cpu_threads),
            "OMP_WAIT_POLICY": "passive",  # a spinning team stalls for seconds when it has to share its cores
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            # No process of its own for the worker: it would only import everything a third time (5 s).
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }
    return environment


def server_arguments(
    config: EngineConfig, model_path: str | Path, *, platform: PlatformName, port: int, seed: int
) -> list[str]:
    """Arguments of vLLM's server."""
    arguments = ["--model", str(model_path), "--host", config.host, "--port", str(port), "--seed", str(seed)]
    arguments += ["--dtype", config.dtype, "--max-num-seqs", str(config.max_num_seqs)]
    arguments += ["--hf-overrides", json.dumps({"head_dtype": "float32"})]
    arguments += ["--logprobs-mode", "processed_logprobs"]  # at the sampling temperature
    arguments += ["--generation-config", "vllm"]  # no sampling defaults from the checkpoint
    arguments += ["--enable-scale-out"]  # /inference/v1/generate
    arguments += ["--weight-transfer-config", json.dumps({"backend": "megatron_rl"})]
    arguments += ["--worker-extension-cls", "megatron_rl.engine.worker.WorkerExtension"]
    arguments += ["--scheduler-cls", f"megatron_rl.engine.scheduler.{'Cpu' if platform == 'cpu' else 'Gpu'}Scheduler"]
    arguments += ["--enable-prefix-caching" if config.prefix_caching else "--no-enable-prefix-caching"]
    arguments += ["--disable-log-stats", "--disable-uvicorn-access-log"]
    if config.max_model_len is not None:
        arguments += ["--max-model-len", str(config.max_model_len)]
    if platform == "cpu":
        # Without a fixed size, or with torch.compile, vLLM runs the model once at start to measure or to compile.
        arguments += ["--enforce-eager", "--kv-cache-memory-bytes", str(int(config.kv_cache_gib * 2**30))]
    else:
        arguments += ["--gpu-memory-utilization", str(config.gpu_memory_share)]
    return arguments + config.vllm_args


def require_free_port(host: str, port: int) -> None:
    """ConfigError if another program listens on host:port."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"engine.port must be free on {host}, got {port} ({error.strerror}); stop what uses it, or set "
                "engine.port=0 to take any free port"
            ) from error


def free_port(host: str = "127.0.0.1") -> int:
    """A port that was free a moment ago, below those that the kernel hands out.

    An engine binds it only after seconds of imports; until then any connection of another process could be given a port
    of the kernel's own range (32768 and up on Linux).
    """
    for port in random.SystemRandom().sample(range(20000, 32000), k=100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind((host, port))
            return port
    raise EngineError(f"{host} must have a free port from 20000 to 31999, got 100 taken ones; end other servers")


def wait_until_ready(url: str, process: Process, log_path: Path, timeout_s: float) -> None:
    """Returns when the server answers. EngineError with the end of its log if it died or took too long."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        status = process.poll()
        if status is not None:
            raise EngineError(f"engine {url} ended with status {status} while starting{_log_end(log_path)}")
        if answers(url):
            return
        time.sleep(0.1)
    raise EngineError(f"engine {url} was not ready after {timeout_s:g} s (engine.start_timeout_s){_log_end(log_path)}")


def answers(url: str) -> bool:
    """Whether the server at url says that it is healthy."""
    with suppress(OSError, urllib.error.URLError), urllib.request.urlopen(f"{url}/health", timeout=5) as response:
        return response.status == 200
    return False


def _log_end(log_path: Path) -> str:
    try:
        lines = log_path.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:]
    except OSError as error:
        return f"; its log {log_path} cannot be read ({error.strerror})"
    return "\n".join([f"; last lines of {log_path}:", *(f"  | {line}" for line in lines)])


def check_engine(config: EngineConfig, model: Path) -> None:
    """ConfigError if an engine could not start or would be unsafe."""
    if not (model / "config.json").is_file():
        raise ConfigError(f"an engine's model must be a folder with a config.json, got {model}; correct model.path")
    if not config.allow_remote and not is_loopback(config.host):
        raise ConfigError(
            f"engine.host must be a loopback address, got {config.host}: whoever reaches this port can run code on "
            "this machine; inside a network that you trust set engine.allow_remote=true"
        )
    if config.tensor_parallel > 1:
        raise ConfigError(
            f"engine.tensor_parallel must be 1 so far, got {config.tensor_parallel}: weights are received by one "
            "worker; raise engine.count instead"
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the host."""
    if host == "localhost":
        return True
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


def main(arguments: Sequence[str]) -> None:
    """Serves until it is ended."""
    parser = argparse.ArgumentParser(prog="python -m megatron_rl.engine.server")
    parser.add_argument("--model", required=True, help="HF folder")
    parser.add_argument("--platform", required=True, choices=["cpu", "cuda"])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--config", default="{}", help="EngineConfig as JSON")
    options = parser.parse_args(arguments)
    config = EngineConfig.model_validate_json(options.config)
    try:
        check_engine(config, Path(options.model))
        require_free_port(config.host, options.port)
    except ConfigError as error:
        sys.exit(f"error: {error}")
    os.environ |= server_environment(config, options.platform)
    os.environ[SERVER_PID] = str(os.getpid())
    # Heavy, and reads the environment.
    from megatron_rl.engine.serve import serve

    serve(server_arguments(config, options.model, platform=options.platform, port=options.port, seed=options.seed))


if __name__ == "__main__":
    main(sys.argv[1:])
