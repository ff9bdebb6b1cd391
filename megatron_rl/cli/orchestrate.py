"""The orchestrator process: python -m megatron_rl.cli.orchestrate CONFIG [key=value ...]."""

import asyncio
import sys

from megatron_rl.checkpoint.folders import latest_checkpoint, read_extra, reading
from megatron_rl.cli.addresses import listening_address
from megatron_rl.cli.runs import RlRun
from megatron_rl.cli.user_errors import run_with_user_errors
from megatron_rl.config import ConfigError
from megatron_rl.config.load import load_config
from megatron_rl.data.render import ChatRenderer, load_tokenizer
from megatron_rl.engine.client import EngineClient
from megatron_rl.engine.pool import EnginePool
from megatron_rl.orchestrator.loop import Orchestrator
from megatron_rl.orchestrator.source import PromptSource
from megatron_rl.orchestrator.state import decode_state
from megatron_rl.rollout.environments import make_environment


def engine_pool(run: RlRun) -> EnginePool:
    """Clients of every engine of the run."""
    return EnginePool([EngineClient(url, timeout_s=run.engine.request_timeout_s) for url in run.engine.urls])


async def orchestrate(run: RlRun) -> None:
    """Serves the trainer until it says that the run is finished."""
    environments = [make_environment(config) for config in run.environments]
    source = PromptSource(environments, [config.weight for config in run.environments], seed=run.run.seed)
    latest = latest_checkpoint(run.run.folder / "checkpoints")
    if latest is not None:
        with reading(latest):
            source.restore(decode_state(read_extra(latest, "orchestrator")))
    pool = engine_pool(run)
    try:
        orchestrator = Orchestrator(
            environments,
            source,
            pool,
            ChatRenderer(load_tokenizer(run.model.path)),
            config=run.orchestrator,
            rollout=run.rollout,
            pad_multiple=run.parallel.tensor,
            loss=run.loss,
        )
        await orchestrator.serve(listening_address(run.orchestrator.address))
    finally:
        await pool.close()


def serve(run: RlRun) -> None:
    """Runs until the trainer says that the run is finished. ConfigError without addresses."""
    if not run.orchestrator.address or not run.engine.urls:
        raise ConfigError(
            "an orchestrator started by hand needs orchestrator.address and engine.urls; "
            "on one machine start everything with: megatron-rl rl CONFIG"
        )
    asyncio.run(orchestrate(run))


def main(arguments: list[str]) -> None:
    """Loads the config and serves."""
    serve(load_config(arguments[0], RlRun, arguments[1:]))


if __name__ == "__main__":
    sys.exit(run_with_user_errors(lambda: main(sys.argv[1:])))
