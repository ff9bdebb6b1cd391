"""Megatron-Core 0.16 on a machine without a GPU: every change to it, each with its reason.

Megatron asks torch.cuda for devices and random states. Those of its modules that do get a stand-in for `torch`, in
which a few names answer for the CPU; torch itself stays as it is for everybody else in the process.
"""

import importlib
import types
from collections.abc import Callable, Collection
from typing import Any

import torch

CPU = torch.device("cpu")
_applied: set[str] = set()


class _Stand(types.ModuleType):
    """A module that answers with its own attributes first, then with those of the module it stands for."""

    def __init__(self, original: types.ModuleType) -> None:
        super().__init__(original.__name__)
        self.__dict__["original"] = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["original"], name)


def _megatron(name: str) -> types.ModuleType:
    return importlib.import_module(f"megatron.core.{name}")


def _torch_of(name: str) -> Any:
    """The stand-in for torch inside megatron.core.<name>, put there at first use."""
    module = _megatron(name)
    if not isinstance(module.torch, _Stand):
        module.torch = _Stand(torch)  # type: ignore[attr-defined]
        module.torch.cuda = _Stand(torch.cuda)  # type: ignore[attr-defined]
    return module.torch


def _current_device_is_cpu(*names: str) -> None:
    for name in names:
        _torch_of(name).cuda.current_device = lambda: CPU


def _cuda_means_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    def create(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") == "cuda":
            kwargs["device"] = CPU
        return factory(*args, **kwargs)

    return create


def random_states() -> None:
    """The random-state tracker reads and sets the generator that dropout and initialisation draw from: the CPU's."""
    stand = _torch_of("tensor_parallel.random")
    stand.cuda.get_rng_state = lambda *_args: torch.get_rng_state()
    random: Any = _megatron("tensor_parallel.random")
    random._get_cuda_rng_state = lambda *_args, **_kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_args, **_kwargs: torch.set_rng_state(state)


def seeding() -> None:
    """torch.cuda.manual_seed without a GPU is silently kept for later: every tracked state would be the same."""
    _torch_of("tensor_parallel.random").cuda.manual_seed = torch.manual_seed


def collective_buffers() -> None:
    """Tensor, sequence and expert parallel collectives receive into a tensor on the current CUDA device."""
    _current_device_is_cpu("tensor_parallel.mappings", "tensor_parallel.layers", "utils")


def gradient_buffers() -> None:
    """DistributedDataParallel lays gradients into one tensor on the current CUDA device."""
    _current_device_is_cpu("distributed.param_and_grad_buffer")


def optimizer_scalars() -> None:
    """The optimizer keeps its loss scale in a tensor with the literal device "cuda"."""
    _torch_of("optimizer.optimizer").tensor = _cuda_means_cpu(torch.tensor)


def gradient_norm() -> None:
    """The norm's scratch tensors have the literal device "cuda"."""
    _torch_of("optimizer.clip_grads").zeros = _cuda_means_cpu(torch.zeros)
    _torch_of("utils").tensor = _cuda_means_cpu(torch.tensor)


def gradient_clipping() -> None:
    """Clipping asserts that every gradient's type is spelt torch.cuda.FloatTensor."""

    def clip(parameters: Any, max_norm: float, total_norm: float, use_decoupled_grad: bool = False) -> None:
        assert not use_decoupled_grad, "decoupled gradients belong to the precision-aware optimizer"
        scale = max_norm / (total_norm + 1.0e-6)
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if scale < 1.0 and grads:
            torch._foreach_mul_(grads, scale)  # type: ignore[attr-defined]

    _megatron("optimizer.optimizer").clip_grad_by_total_norm_fp32 = clip  # type: ignore[attr-defined]


def bf16_master_weights() -> None:
    """The bfloat16 optimizers know parameters by type names such as torch.cuda.BFloat16Tensor, while they are built."""

    def with_cuda_names(build: Callable[..., None]) -> Callable[..., None]:
        def build_with_cuda_names(self: Any, *args: Any, **kwargs: Any) -> None:
            plain_type = torch.Tensor.type
            torch.Tensor.type = lambda tensor: plain_type(tensor).replace("torch.", "torch.cuda.")  # type: ignore
            try:
                build(self, *args, **kwargs)
            finally:
                torch.Tensor.type = plain_type  # type: ignore[method-assign]

        return build_with_cuda_names

    plain = _megatron("optimizer.optimizer").Float16OptimizerWithFloat16Params
    distributed = _megatron("optimizer.distrib_optimizer").DistributedOptimizer
    for optimizer_class in (plain, distributed):
        optimizer_class.__init__ = with_cuda_names(optimizer_class.__init__)


def pipeline_buffers() -> None:
    """Pipeline stages receive into tensors on the current CUDA device, and wait for it after telling the shapes."""
    _current_device_is_cpu("pipeline_parallel.p2p_communication")
    _torch_of("pipeline_parallel.p2p_communication").cuda.synchronize = lambda: None


def schedule_counter() -> None:
    """Every schedule counts tokens in a tensor with the literal device "cuda"."""
    _torch_of("pipeline_parallel.schedules").zeros = _cuda_means_cpu(torch.zeros)


PATCHES: dict[str, Callable[[], None]] = {
    patch.__name__: patch
    for patch in (
        random_states,
        seeding,
        collective_buffers,
        gradient_buffers,
        optimizer_scalars,
        gradient_norm,
        gradient_clipping,
        bf16_master_weights,
        pipeline_buffers,
        schedule_counter,
    )
}


def import_megatron() -> None:
    """Imports Megatron-Core with torch.compile switched off meanwhile: 2.5 instead of 4.5 CPU-seconds.

    Megatron wraps its fused functions at import, which loads the whole compiler; the CPU's layers use none of them.
    """

    def leave_eager(function: Any = None, **_options: Any) -> Any:
        return leave_eager if function is None else function

    compile_function = torch.compile
    torch.compile = leave_eager  # type: ignore[assignment]
    try:
        for name in ("models.gpt.gpt_layer_specs", "optimizer", "pipeline_parallel.schedules"):
            _megatron(name)
    finally:
        torch.compile = compile_function


def apply(*, leave_out: Collection[str] = ()) -> None:
    """Imports Megatron-Core and patches it, once per process; leave_out: patches to omit (tests prove each needed)."""
    import_megatron()
    for name, patch in PATCHES.items():
        if name not in leave_out and name not in _applied:
            patch()
            _applied.add(name)
