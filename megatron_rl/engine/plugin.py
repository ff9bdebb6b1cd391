"""vLLM general plugin, loaded by vLLM in every process of a server: what this house adds to it."""

from megatron_rl.engine import vllm_on_cpu
from megatron_rl.engine.lifetime import end_with_server

TRANSFER_BACKEND = "megatron_rl"


def register() -> None:
    """Entry point megatron_rl of vllm.general_plugins. May be called more than once."""
    end_with_server()
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    from vllm.platforms import current_platform

    if TRANSFER_BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            TRANSFER_BACKEND, "megatron_rl.engine.transfer_engine", "ArenaTransferEngine"
        )
    if current_platform.is_cpu():
        vllm_on_cpu.apply()
