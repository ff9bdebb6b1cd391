"""One engine of a run, started by hand or by a script of a cluster."""

import os

from megatron_rl.cli.addresses import engine_place
from megatron_rl.cli.runs import RlRun
from megatron_rl.config import ConfigError
from megatron_rl.engine.server import engine_command, is_loopback


def serve_engine(run: RlRun, index: int) -> None:
    """Becomes the vLLM server of engine.urls[index]: signals reach it directly. ConfigError if it could not serve."""
    urls = run.engine.urls
    if not urls:
        raise ConfigError(
            "an engine started by hand needs engine.urls, got none; name every engine of the run there, "
            "or start everything on one machine with: megatron-rl rl CONFIG"
        )
    if not 0 <= index < len(urls):
        raise ConfigError(f"--index must count the {len(urls)} engine.urls from 0, got {index}; choose another")
    host, port = engine_place(urls[index])
    if is_loopback(run.engine.host) and not is_loopback(host):
        raise ConfigError(
            f"engine.host must be an address by which {urls[index]} reaches this machine, got {run.engine.host}; set "
            "engine.host=0.0.0.0 and, inside a network that you trust, engine.allow_remote=true"
        )
    argv, environment = engine_command(
        run.engine, run.model.path, platform=run.run.platform, port=port, seed=run.run.seed + index
    )
    os.execve(argv[0], argv, {**os.environ, **environment})
