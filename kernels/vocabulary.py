"""What heads without logits share: logits of a chunk of tokens against one vocabulary shard, and their gradients' sums.

Low-precision inputs are taken to float32 in front of the matmul, where their products are exact: what is rounded to the
inputs' precision is the gradients, once.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

_CHUNK_ELEMENTS = {"cpu": 2**24, "cuda": 2**27}
"""Logits formed at a time: 64 MiB on the CPU, where fewer rows slow the head's gradient down; 512 MiB on GPUs."""
_LEAST_CHUNK = 128
"""Rows below which the matmuls themselves get slow, however large V is."""
_TILE_ELEMENTS = 2**17
"""Logits per thread that passes over rows take at a time on a CPU: 512 KiB, so that they stay in its own cache."""


def default_chunk(num_rows_V: int, device_type: str) -> int:
    """Tokens whose logits are formed at a time against so many rows of the head."""
    budget = _CHUNK_ELEMENTS.get(device_type, _CHUNK_ELEMENTS["cuda"])
    return max(_LEAST_CHUNK, budget // num_rows_V)


def chunks(num_tokens: int, chunk: int) -> list[slice]:
    """All tokens in order, chunk at a time."""
    return [slice(start, min(start + chunk, num_tokens)) for start in range(0, num_tokens, chunk)]


def row_tiles(logits_cV: Tensor) -> list[slice]:
    """The rows of a chunk, as many at a time as passes over them should take: on a CPU a cacheful, elsewhere all."""
    num_rows, num_columns = logits_cV.shape
    if logits_cV.device.type != "cpu":
        return chunks(num_rows, max(1, num_rows))
    return chunks(num_rows, max(1, _TILE_ELEMENTS * torch.get_num_threads() // num_columns))


def tile_scratch(logits_cV: Tensor) -> Tensor:
    """Uninitialised room for the largest of row_tiles."""
    return torch.empty_like(logits_cV[row_tiles(logits_cV)[0]])


Passes = TypeVar("Passes")


class HeadCall(NamedTuple, Generic[Passes]):
    """What the forward and the backward of a head share beside tensors."""

    group: ProcessGroup | None
    temperature: float
    chunk: int
    passes: Passes
    """What goes over the rows of a chunk of logits: in torch, or in Triton."""


@dataclass(frozen=True)
class HeadShard:
    """Hidden states against one rank's rows of a head, logits over temperature."""

    hidden_TH: Tensor
    head32_VH: Tensor
    """float32, whatever the head is kept in."""
    exact_in_units: bool
    """Products of hidden and head are as exact in matrix units as in float32 (see matrix_units)."""
    temperature: float

    @classmethod
    def of(cls, hidden_TH: Tensor, head_VH: Tensor, temperature: float) -> "HeadShard":
        """Copies a head of lower precision to float32."""
        exact = {hidden_TH.dtype, head_VH.dtype} <= _units(head_VH.device.type)[2]
        return cls(hidden_TH, head_VH.float(), exact, temperature)

    def buffer(self, chunk: int) -> Tensor:
        """Uninitialised room for the logits of a chunk."""
        return self.head32_VH.new_empty(min(chunk, len(self.hidden_TH)), len(self.head32_VH))

    def logits(self, rows: slice, buffer: Tensor) -> Tensor:
        """float32 [c, V] of these tokens, in the first rows of buffer."""
        hidden32 = self.hidden_TH[rows].float()
        out = buffer[: len(hidden32)]
        with matrix_units(out.device.type, self.exact_in_units):
            return torch.addmm(out, hidden32, self.head32_VH.t(), beta=0, alpha=1.0 / self.temperature, out=out)


class GradientSums:
    """Gradients of a HeadShard's hidden states and head, from gradients of its logits that come chunk by chunk."""

    def __init__(self, shard: HeadShard, *, hidden: bool, head: bool) -> None:
        """hidden, head: which of the two are wanted."""
        self._shard = shard
        self._hidden = torch.empty_like(shard.hidden_TH, dtype=torch.float32) if hidden else None
        self._head = torch.zeros_like(shard.head32_VH) if head else None

    def add(self, rows: slice, slope_cV: Tensor) -> None:
        """slope_cV: d loss / d logits of these tokens, float32. Every token must come once."""
        shard = self._shard
        # On GPUs matrix units take the slope to 11 bits where the gradients end with at most as many.
        with matrix_units(slope_cV.device.type, shard.exact_in_units and slope_cV.device.type == "cuda"):
            if self._hidden is not None:
                torch.mm(slope_cV, shard.head32_VH, out=self._hidden[rows])
            if self._head is not None:
                self._head.addmm_(slope_cV.t(), shard.hidden_TH[rows].float(), alpha=1.0 / shard.temperature)

    def finish(
        self, group: ProcessGroup | None, *, hidden_dtype: torch.dtype, head_dtype: torch.dtype
    ) -> tuple[Tensor | None, Tensor | None]:
        """(hidden gradient, summed over group; this shard's head gradient)."""
        if self._hidden is not None:
            reduce_sum(self._hidden.div_(self._shard.temperature), group)
        return (
            None if self._hidden is None else self._hidden.to(hidden_dtype),
            None if self._head is None else self._head.to(head_dtype),
        )


def reduce_sum(values: Tensor, group: ProcessGroup | None) -> Tensor:
    """values, summed over group in place."""
    if group is not None and values.numel():
        dist.all_reduce(values, group=group)
    return values


def reduce_max(values: Tensor, group: ProcessGroup | None) -> Tensor:
    """The largest of each entry over group, as a new tensor."""
    values = values.clone()
    if group is not None and values.numel():
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group)
    return values


@contextlib.contextmanager
def matrix_units(device_type: str, allowed: bool) -> Iterator[None]:
    """float32 products by the device's matrix units, if allowed.

    They take factors to their input format (bfloat16 on CPUs, TF32 on GPUs), multiply exactly and add up in float32.
    """
    matmul, input_format, _ = _units(device_type)
    before = matmul.fp32_precision
    if allowed:
        matmul.fp32_precision = input_format
    try:
        yield
    finally:
        matmul.fp32_precision = before


def _units(device_type: str) -> tuple[Any, str, set[torch.dtype]]:
    """(torch's switch, input format of the matrix units, dtypes whose values that format holds)."""
    if device_type == "cuda":
        return torch.backends.cuda.matmul, "tf32", {torch.bfloat16, torch.float16}
    onednn: Any = torch.backends.mkldnn
    return onednn.matmul, "bf16", {torch.bfloat16}


def check_head(
    hidden_TH: Tensor, head_VH: Tensor, *, vocab_start: int, temperature: float, chunk: int | None, name: str = "hidden"
) -> None:
    """ValueError for arguments that no head takes; name: what the caller calls hidden_TH."""
    if hidden_TH.dim() != 2 or head_VH.dim() != 2 or hidden_TH.shape[1] != head_VH.shape[1] or not len(head_VH):
        raise ValueError(
            f"{name} must be [T, H] and its head [V, H] with one H and V at least 1, got {list(hidden_TH.shape)} and "
            f"{list(head_VH.shape)}; flatten batch dimensions first"
        )
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, got {temperature}; 1 is the model's own distribution")
    if vocab_start < 0:
        raise ValueError(f"vocab_start must not be negative, got {vocab_start}; it is the first row of this shard")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk must be at least 1 token, got {chunk}; None chooses by the size of the cache")
