"""Several engines as one generator: each request goes to the engine with the fewest under way."""

import asyncio
from collections.abc import Sequence
from typing import Protocol

from megatron_rl.engine.records import Completion


class Client(Protocol):
    """One engine."""

    async def generate(
        self, prompt_ids: Sequence[int], *, max_tokens: int, temperature: float, stop_token_ids: Sequence[int]
    ) -> Completion:
        """One continuation."""
        ...

    async def close(self) -> None: ...


class EnginePool:
    """Implements the rollouts' Generator. Errors pass through: they name the engine."""

    def __init__(self, clients: Sequence[Client]) -> None:
        if not clients:
            raise ValueError("a pool needs at least one engine client, got none")
        self._clients = list(clients)
        self._under_way = [0] * len(clients)

    async def generate(
        self, prompt_ids: Sequence[int], *, max_tokens: int, temperature: float, stop_token_ids: Sequence[int]
    ) -> Completion:
        """One continuation from the engine with the fewest under way, the first of them."""
        index = min(range(len(self._clients)), key=self._under_way.__getitem__)
        self._under_way[index] += 1
        try:
            return await self._clients[index].generate(
                prompt_ids, max_tokens=max_tokens, temperature=temperature, stop_token_ids=stop_token_ids
            )
        finally:
            self._under_way[index] -= 1

    async def close(self) -> None:
        """Closes every client."""
        await asyncio.gather(*(client.close() for client in self._clients))
