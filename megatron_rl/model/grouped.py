"""Rows times the matrices of their experts on the CPU, one matrix product per expert.

oneDNN, which computes products in low precision, compiles code for every shape it has not met (about 2 ms), and an
expert's number of rows is a new one in nearly every step. So there numbers of rows are rounded up to few sizes; with
that, a bfloat16 product and its gradient took a fifteenth of torch's grouped_mm.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class GroupedProduct(torch.autograd.Function):
    """rows @ weight[expert of the row].T, [R, O]; rows_RI is sorted by expert, of which each has num_rows[expert].

    Values of the inputs must be finite: what is not may spread to the gradient of the expert before.
    """

    @staticmethod
    def forward(ctx: Any, rows_RI: Tensor, weight_EOI: Tensor, num_rows: Sequence[int]) -> Tensor:
        ctx.save_for_backward(rows_RI, weight_EOI)
        ctx.num_rows = num_rows
        return _times(rows_RI, weight_EOI.transpose(1, 2), num_rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows_RI, weight_EOI = ctx.saved_tensors
        grad_RO = grads[0].contiguous()
        grad_rows = _times(grad_RO, weight_EOI, ctx.num_rows) if ctx.needs_input_grad[0] else None
        grad_weight = _outer(grad_RO, rows_RI, ctx.num_rows) if ctx.needs_input_grad[1] else None
        return grad_rows, grad_weight, None


def padded_rows(num_rows: int, dtype: torch.dtype) -> int:
    """num_rows rounded up by at most a sixteenth (to 16 below 256); as it is in float32, which compiles nothing."""
    if dtype.itemsize >= 4:
        return num_rows
    step = max(16, 1 << max(0, num_rows.bit_length() - 5))
    return -(-num_rows // step) * step


def _times(rows: Tensor, matrices: Tensor, num_rows: Sequence[int]) -> Tensor:
    """rows[of expert e] @ matrices[e].

    What a product gives for padding is overwritten by the next expert's, since experts go in their order.
    """
    out = rows.new_empty(len(rows), matrices.shape[2])
    start = 0
    for matrix, count in zip(matrices, num_rows, strict=True):
        padded = padded_rows(count, rows.dtype)
        if start + padded <= len(rows):
            torch.mm(rows[start : start + padded], matrix, out=out[start : start + padded])
        else:
            out[start : start + count] = torch.mm(_zero_filled(rows[start : start + count], padded), matrix)[:count]
        start += count
    return out


def _outer(left: Tensor, right: Tensor, num_rows: Sequence[int]) -> Tensor:
    """left[of expert e].T @ right[of expert e], [E, O, I]. Padding of left is zero, whatever right has beside it."""
    out = left.new_empty(len(num_rows), left.shape[1], right.shape[1])
    start = 0
    for product, count in zip(out, num_rows, strict=True):
        padded, end = padded_rows(count, left.dtype), start + count
        if padded == count:
            torch.mm(left[start:end].t(), right[start:end], out=product)
        else:
            inside = start + padded <= len(right)
            rows = right[start : start + padded] if inside else _zero_filled(right[start:end], padded)
            torch.mm(_zero_filled(left[start:end], padded).t(), rows, out=product)
        start = end
    return out


def _zero_filled(rows: Tensor, length: int) -> Tensor:
    filled = rows.new_empty(length, rows.shape[1])
    filled[: len(rows)] = rows
    filled[len(rows) :] = 0
    return filled
