"""Where the pool sends requests."""

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from megatron_rl.engine.errors import EngineError
from megatron_rl.engine.pool import EnginePool
from megatron_rl.engine.records import Completion


class Engine:
    """Counts its requests and holds them until it is told to answer."""

    def __init__(self, *, dead: bool = False) -> None:
        self.seen = 0
        self.answer = asyncio.Event()
        self.closed = False
        self._dead = dead

    async def generate(
        self, prompt_ids: Sequence[int], *, max_tokens: int, temperature: float, stop_token_ids: Sequence[int]
    ) -> Completion:
        self.seen += 1
        if self._dead:
            raise EngineError("engine http://b failed 5 times")
        await self.answer.wait()
        streams = np.zeros(1, np.int32), np.zeros(1, np.float32), np.zeros(1, np.int32)
        return Completion(*streams, finish_reason="stop")

    async def close(self) -> None:
        self.closed = True


async def start(pool: EnginePool, count: int) -> list[asyncio.Task[Completion]]:
    tasks = [
        asyncio.create_task(pool.generate([1], max_tokens=1, temperature=1.0, stop_token_ids=[])) for _ in range(count)
    ]
    await asyncio.sleep(0)
    return tasks


def test_requests_go_where_the_fewest_are_under_way() -> None:
    async def run() -> None:
        slow, fast = Engine(), Engine()
        pool = EnginePool([slow, fast])
        first = await start(pool, 6)
        assert (slow.seen, fast.seen) == (3, 3)
        fast.answer.set()
        await asyncio.sleep(0.01)
        second = await start(pool, 2)
        assert (slow.seen, fast.seen) == (3, 5), "the slow engine still has three"
        slow.answer.set()
        await asyncio.gather(*first, *second)
        await pool.close()
        assert slow.closed and fast.closed

    asyncio.run(run())


def test_failed_request_frees_its_place_and_keeps_its_reason() -> None:
    async def run() -> None:
        alive, dead = Engine(), Engine(dead=True)
        alive.answer.set()
        pool = EnginePool([dead, alive])
        for _ in range(3):
            (task,) = await start(pool, 1)
            with pytest.raises(EngineError, match="http://b"):
                await task
        assert dead.seen == 3

    asyncio.run(run())


def test_pool_needs_an_engine() -> None:
    with pytest.raises(ValueError, match="at least one"):
        EnginePool([])
