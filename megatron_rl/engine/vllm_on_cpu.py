"""What vLLM 0.32 gets wrong on the CPU, each with its reason. The only place that changes vLLM's code."""

from collections.abc import Callable
from typing import Any


def repack_experts_after_reload() -> None:
    """A weight reload copies unquantised expert weights into the packed storage without packing them.

    UnquantizedFusedMoEMethod._setup_kernel packs for the CPU's grouped GEMM on the first load only. Without this the
    experts compute with shuffled weights after every update: log-probs are off by 1-2 nats, and nothing is reported.
    """
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    original = UnquantizedFusedMoEMethod._setup_kernel

    def setup_kernel(self: Any, layer: Any, w13: Any, w2: Any) -> None:
        is_reload = self.moe_kernel is not None
        original(self, layer=layer, w13=w13, w2=w2)
        if is_reload:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    UnquantizedFusedMoEMethod._setup_kernel = setup_kernel


def fork_engine_core() -> None:
    """vLLM spawns its engine process afresh on the CPU: everything is imported a second time (6 CPU-seconds, 0.4 GiB).

    Spawning is for accelerators, whose drivers do not survive a fork. At that moment the server has one Python thread
    and, besides, only ZeroMQ's, whose sockets the engine does not use: no lock can be left held.
    """
    import multiprocessing

    from vllm.v1.engine import utils

    utils.get_mp_context = lambda: multiprocessing.get_context("fork")  # pyright: ignore[reportPrivateImportUsage]


def repack_tied_head(model: Any) -> None:
    """To be called after every reload: a head that shares the embedding's weight keeps its old packed copy.

    A reload packs anew each layer that it loads. A tied head is not loaded, yet on the CPU it has a packed copy of its
    own from the first load: without this every update leaves the old head on new layers.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)


PATCHES: dict[str, Callable[[], None]] = {
    "repack_experts_after_reload": repack_experts_after_reload,
    "fork_engine_core": fork_engine_core,
}
_applied: set[str] = set()


def apply() -> None:
    """Applies every patch once per process."""
    for name, patch in PATCHES.items():
        if name not in _applied:
            patch()
            _applied.add(name)
