"""The row passes in Triton: one read of both chunks of logits for stats, one more and a write for the gradient."""
# Triton is installed where CUDA is; without it pyright takes a kernel for a function without a grid.
# pyright: reportMissingImports=false, reportIndexIssue=false

import torch
import triton
import triton.language as tl
from megatron_rl_kernels.linear_distill.reference import PairPasses, PairSoftmax, PairStats
from torch import Tensor

_BLOCK = 4096
"""Columns at a time: with 8 warps 16 per thread and model, loaded 16 bytes at a time."""
_WARPS = 8
_LOWEST = tl.constexpr(-3.0e38)
"""Outside of a row: finite, so that its product with the 0 that its exp is stays 0."""


@triton.jit
def _stats_kernel(student, teacher, stats, num_rows, num_columns, BLOCK: tl.constexpr):
    """One row, into a column of stats [5, num_rows]. Sums are relative to the largest entries so far."""
    row = tl.program_id(0).to(tl.int64)
    peak_p = _LOWEST
    peak_q = _LOWEST
    total_p = 0.0
    total_q = 0.0
    weighted = 0.0  # sum of exp(y - peak_q) ((y - peak_q) - (z - peak_p))
    for start in range(0, num_columns, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < num_columns
        z = tl.load(student + row * num_columns + columns, mask=inside, other=_LOWEST)
        y = tl.load(teacher + row * num_columns + columns, mask=inside, other=_LOWEST)
        higher_p = tl.maximum(peak_p, tl.max(z, 0))
        higher_q = tl.maximum(peak_q, tl.max(y, 0))
        scale_q = tl.exp(peak_q - higher_q)
        mass_q = tl.exp(y - higher_q)
        log_ratio = (y - higher_q) - (z - higher_p)
        shift = (peak_q - higher_q) - (peak_p - higher_p)
        weighted = scale_q * (weighted + total_q * shift) + tl.sum(mass_q * log_ratio, 0)
        total_q = scale_q * total_q + tl.sum(mass_q, 0)
        total_p = tl.exp(peak_p - higher_p) * total_p + tl.sum(tl.exp(z - higher_p), 0)
        peak_p = higher_p
        peak_q = higher_q
    tl.store(stats + row, peak_p)
    tl.store(stats + num_rows + row, total_p)
    tl.store(stats + 2 * num_rows + row, peak_q)
    tl.store(stats + 3 * num_rows + row, total_q)
    tl.store(stats + 4 * num_rows + row, weighted / total_q + tl.log(total_p / total_q))


@triton.jit
def _gradient_kernel(student, teacher, entries, num_rows, num_columns, BLOCK: tl.constexpr):
    """BLOCK cells of one row. entries: peak and log_total of student, of teacher, and g, [5, num_rows]."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < num_columns
    cells = row * num_columns + columns
    peak_p = tl.load(entries + row)
    peak_q = tl.load(entries + 2 * num_rows + row)
    z = tl.load(student + cells, mask=inside, other=peak_p)
    y = tl.load(teacher + cells, mask=inside, other=peak_q)
    p = tl.exp((z - peak_p) - tl.load(entries + num_rows + row))
    q = tl.exp((y - peak_q) - tl.load(entries + 3 * num_rows + row))
    tl.store(student + cells, tl.load(entries + 4 * num_rows + row) * (p - q), mask=inside)


def _stats(student_cV: Tensor, teacher_cV: Tensor) -> PairStats:
    num_rows, num_columns = student_cV.shape
    stats = student_cV.new_empty(5, num_rows)
    _stats_kernel[(num_rows,)](student_cV, teacher_cV, stats, num_rows, num_columns, BLOCK=_BLOCK, num_warps=_WARPS)
    return PairStats(*stats)


def _gradient(student_cV: Tensor, teacher_cV: Tensor, softmax: PairSoftmax, by_kl: Tensor) -> None:
    num_rows, num_columns = student_cV.shape
    entries = torch.stack(
        [
            softmax.student_peak,
            softmax.student_log_total,
            softmax.teacher_peak,
            softmax.teacher_log_total,
            by_kl.double(),
        ]
    ).float()
    grid = (num_rows, triton.cdiv(num_columns, _BLOCK))
    _gradient_kernel[grid](student_cV, teacher_cV, entries, num_rows, num_columns, BLOCK=_BLOCK, num_warps=_WARPS)


TRITON_PASSES = PairPasses(_stats, _gradient)
