"""Several engines as one generator: each request goes to the engine with the fewest under way."""

import asyncio
from collections.abc import Sequence
from typing import Protocol

from megatron_rl.engine.records import Completion


class Client(Protocol):
    """One engine."""

    url: str

    async def generate_many(
        self, prompt_ids: Sequence[int], *, n: int, max_tokens: int, temperature: float, stop_token_ids: Sequence[int]
    ) -> list[Completion]:
        """n continuations of one prompt."""
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
        """One continuation."""
        completions = await self.generate_many(
            prompt_ids, n=1, max_tokens=max_tokens, temperature=temperature, stop_token_ids=stop_token_ids
        )
        return completions[0]

    async def generate_many(
        self, prompt_ids: Sequence[int], *, n: int, max_tokens: int, temperature: float, stop_token_ids: Sequence[int]
    ) -> list[Completion]:
        """n continuations of one prompt, from one engine."""
        index = min(range(len(self._clients)), key=self._under_way.__getitem__)
        self._under_way[index] += n
        try:
            return await self._clients[index].generate_many(
                prompt_ids, n=n, max_tokens=max_tokens, temperature=temperature, stop_token_ids=stop_token_ids
            )
        finally:
            self._under_way[index] -= n

    async def close(self) -> None:
        """Closes every client."""
        await asyncio.gather(*(client.close() for client in self._clients))
