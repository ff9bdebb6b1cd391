"""Rows on their way to the experts and back. Every step is a permutation, so its gradient is the inverse gather."""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import all_to_all
from torch import Tensor


def inverse_order(order: Tensor) -> Tensor:
    """inverse[order[i]] = i"""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))


def all_counts(counts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The counts of every rank of group, [ranks, *counts.shape]."""
    gathered = counts.new_empty(group.size(), *counts.shape)
    dist.all_gather_into_tensor(gathered.view(-1), counts.flatten(), group=group)
    return gathered


def gather_rows(rows: Tensor, num_rows: list[int], group: dist.ProcessGroup) -> Tensor:
    """The rows of all ranks of group, one after the other; num_rows says how many each has. gloo's all-gather cannot.

    The gradient is sum_rows of the gradients.
    """
    return all_to_all(group, rows.repeat(len(num_rows), 1), num_rows, [len(rows)] * len(num_rows))


def sum_rows(rows: Tensor, num_rows: list[int], group: dist.ProcessGroup) -> Tensor:
    """Of the rows that gather_rows brought together, this rank's own, summed over group."""
    ways, mine = len(num_rows), num_rows[group.rank()]
    return all_to_all(group, rows, [mine] * ways, num_rows).view(ways, mine, *rows.shape[1:]).sum(0)


class Permute(torch.autograd.Function):
    """rows[order]; inverse is order's inverse permutation."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = grads
        return grad.index_select(0, ctx.saved_tensors[0]), None, None


class Expand(torch.autograd.Function):
    """One row per choice, sorted by expert: row r is token row_order[r] // K. [N, H] -> [N * K, H]"""

    @staticmethod
    def forward(ctx: Any, hidden_NH: Tensor, row_order: Tensor, row_of_choice: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(row_of_choice)
        ctx.top_k = top_k
        return hidden_NH.index_select(0, row_order // top_k)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (grad,) = grads
        per_choice = grad.index_select(0, ctx.saved_tensors[0])
        return per_choice.unflatten(0, (-1, ctx.top_k)).sum(1), None, None, None


class Combine(torch.autograd.Function):
    """Weighted sum of each token's rows. rows [N * K, H], weights [N, K] -> [N, H]"""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights_NK: Tensor, row_order: Tensor, row_of_choice: Tensor) -> Tensor:
        per_choice = rows.index_select(0, row_of_choice).unflatten(0, weights_NK.shape)
        ctx.save_for_backward(per_choice, weights_NK, row_order)
        return torch.bmm(weights_NK.unsqueeze(1), per_choice).squeeze(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (grad_NH,) = grads
        per_choice, weights_NK, row_order = ctx.saved_tensors
        grad_weights = torch.bmm(per_choice, grad_NH.unsqueeze(2)).squeeze(2)
        grad_rows = (weights_NK.unsqueeze(2) * grad_NH.unsqueeze(1)).flatten(0, 1).index_select(0, row_order)
        return grad_rows, grad_weights, None, None
