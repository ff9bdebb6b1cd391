"""Which implementation of an operator runs."""

from importlib.util import find_spec
from typing import Literal

import torch

Impl = Literal["auto", "reference", "kernel"]


def takes_kernel(impl: str, device: torch.device) -> bool:
    """Whether the Triton kernel runs rather than the reference.

    auto: on CUDA where Triton is installed. kernel: ValueError where it cannot run; beside CUDA, Triton's interpreter
    (TRITON_INTERPRET=1) runs it on a CPU, for tests.
    """
    if impl not in ("auto", "reference", "kernel"):
        raise ValueError(f"impl must be auto, reference or kernel, got {impl!r}; auto takes the fastest for the device")
    installed = find_spec("triton") is not None
    if impl == "kernel":
        if not installed:
            raise ValueError("impl='kernel' needs Triton, which is not installed; take auto or reference")
        if device.type != "cuda" and not _interpreted():
            raise ValueError(
                f"impl='kernel' needs tensors on cuda, got {device.type}; take auto, or test it with TRITON_INTERPRET=1"
            )
        return True
    return impl == "auto" and installed and device.type == "cuda"


def _interpreted() -> bool:
    from triton import knobs  # pyright: ignore[reportMissingImports]

    return bool(knobs.runtime.interpret)
