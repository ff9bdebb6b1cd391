"""Other values for a model's tensors, for as long as a block runs."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class FrozenTensors:
    """One more set of values for given tensors.

    What stands in is the tensors' memory, not their values: views of the own memory, such as Megatron's parameter
    buffers and the optimizer's shards, do not see it, and gradients, hooks and marks of the tensors stay as they are.
    """

    def __init__(self, tensors: Iterable[Tensor], *, offload: bool) -> None:
        """Values to be filled. offload: kept in pinned host memory, beside which a block needs room on the device."""
        self._tensors = list({id(tensor): tensor for tensor in tensors}.values())
        self._offload = offload
        device = "cpu" if offload else None
        self._held = [
            torch.empty(tensor.shape, dtype=tensor.dtype, device=device or tensor.device, pin_memory=offload)
            for tensor in self._tensors
        ]

    @contextmanager
    def standing_in(self, *, fill: bool = False) -> Iterator[None]:
        """Inside the block the tensors have these values; after it their own again, also after an exception.

        fill: the block writes them, and what it has written is kept.
        """
        values = self._held
        if self._offload:
            pairs = zip(self._held, self._tensors, strict=True)
            values = [held.to(tensor.device, non_blocking=True) for held, tensor in pairs]
        own = [tensor.data for tensor in self._tensors]
        try:
            _point(self._tensors, values)
            yield
        finally:
            _point(self._tensors, own)
        if fill and self._offload:
            _copy(values, self._held)

    def copy_own(self) -> None:
        """These values become the tensors' own of now."""
        _copy(self._tensors, self._held)


def _point(tensors: list[Tensor], values: list[Tensor]) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        tensor.data = value


@torch.no_grad()
def _copy(sources: list[Tensor], targets: list[Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)
