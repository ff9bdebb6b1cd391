"""Methods that vLLM's worker gets on top of its own, called through /collective_rpc."""

from typing import Any

from megatron_rl.engine.transfer_engine import ArenaTransferEngine


class WorkerExtension:
    """Mixed into the worker by vLLM."""

    weight_transfer_engine: Any

    def weight_arena_address(self) -> dict[str, Any]:
        """ArenaAddress of the arena that init_weight_transfer_engine has opened."""
        assert isinstance(self.weight_transfer_engine, ArenaTransferEngine)
        return self.weight_transfer_engine.address()
