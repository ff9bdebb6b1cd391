"""The row passes in Triton: one read of a chunk of logits for its stats, one read and one write for its gradient."""
# Triton is installed where CUDA is; without it pyright takes a kernel for a function without a grid.
# pyright: reportMissingImports=false, reportIndexIssue=false

import torch
import triton
import triton.language as tl
from megatron_rl_kernels.linear_logprob.reference import RowPasses, RowStats, Softmax
from torch import Tensor

_BLOCK = 4096
"""Columns at a time: with 8 warps 16 per thread, loaded 16 bytes at a time."""
_WARPS = 8
_LOWEST = tl.constexpr(-3.0e38)
"""Outside of a row: finite, so that its product with the 0 that its exp is stays 0."""


@triton.jit
def _stats_kernel(logits, stats, num_rows, num_columns, BLOCK: tl.constexpr):
    """One row, into a column of stats [3, num_rows]. Sums are relative to the largest entry so far."""
    row = tl.program_id(0).to(tl.int64)
    peak = _LOWEST
    total = 0.0
    weighted = 0.0  # sum of exp(z - peak) (z - peak)
    for start in range(0, num_columns, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < num_columns
        z = tl.load(logits + row * num_columns + columns, mask=inside, other=_LOWEST)
        higher = tl.maximum(peak, tl.max(z, 0))
        scale = tl.exp(peak - higher)
        mass = tl.exp(z - higher)
        weighted = scale * (weighted + total * (peak - higher)) + tl.sum(mass * (z - higher), 0)
        total = scale * total + tl.sum(mass, 0)
        peak = higher
    tl.store(stats + row, peak)
    tl.store(stats + num_rows + row, total)
    tl.store(stats + 2 * num_rows + row, weighted / total)


@triton.jit
def _gradient_kernel(logits, entries, num_rows, num_columns, WITH_ENTROPY: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK cells of one row. entries: peak, log_total, g and, with entropy, e and H, [3 or 5, num_rows]."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < num_columns
    cells = logits + row * num_columns + columns
    peak = tl.load(entries + row)
    # From the peak downwards: where p is large, log p must keep its digits.
    log_p = (tl.load(cells, mask=inside, other=peak) - peak) - tl.load(entries + num_rows + row)
    slope = -tl.load(entries + 2 * num_rows + row)
    if WITH_ENTROPY:
        slope -= tl.load(entries + 3 * num_rows + row) * (log_p + tl.load(entries + 4 * num_rows + row))
    tl.store(cells, slope * tl.exp(log_p), mask=inside)


def _stats(logits_cV: Tensor) -> RowStats:
    num_rows, num_columns = logits_cV.shape
    stats = logits_cV.new_empty(3, num_rows)
    _stats_kernel[(num_rows,)](logits_cV, stats, num_rows, num_columns, BLOCK=_BLOCK, num_warps=_WARPS)
    return RowStats(*stats)


def _gradient(logits_cV: Tensor, softmax: Softmax, by_logp: Tensor, by_entropy: Tensor | None) -> None:
    num_rows, num_columns = logits_cV.shape
    entries = [softmax.peak, softmax.log_total, by_logp.double()]
    if by_entropy is not None:
        entries += [by_entropy.double(), softmax.entropy]
    _gradient_kernel[(num_rows, triton.cdiv(num_columns, _BLOCK))](
        logits_cV,
        torch.stack(entries).float(),
        num_rows,
        num_columns,
        WITH_ENTROPY=by_entropy is not None,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )


TRITON_PASSES = RowPasses(_stats, _gradient)
