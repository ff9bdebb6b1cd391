"""vLLM's scheduler with a prefix cache that can be emptied while requests are running."""

import uuid

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler


class _ResettablePrefixCache(Scheduler):
    """Requests that are running keep their blocks; nobody finds these any more, nor those that they fill later."""

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """As vLLM's, but it also succeeds while requests hold blocks, and lets them go on."""
        if self.running and not reset_running_requests:
            self._forget_running()
            return self.reset_connector_cache() if reset_connector else True
        return super().reset_prefix_cache(reset_running_requests, reset_connector)

    def _forget_running(self) -> None:
        """vLLM refuses here: a new request must not hit old blocks, nor new blocks computed on top of old ones."""
        for request in self.requests.values():
            if request.num_computed_tokens > 0:
                request.cache_salt = uuid.uuid4().hex
                request.block_hashes = []
                request.update_block_hashes()
        pool = self.kv_cache_manager.block_pool
        pool.evict_blocks({block.block_id for block in pool.blocks if block.block_hash is not None})


class CpuScheduler(_ResettablePrefixCache):
    """vLLM schedules synchronously on the CPU."""


class GpuScheduler(_ResettablePrefixCache, AsyncScheduler):
    """vLLM schedules one step ahead on GPUs."""
