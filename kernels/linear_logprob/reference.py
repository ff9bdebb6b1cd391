"""The contract in plain torch, and the path on the CPU: token chunks, float32, vocabulary shards.

With z the logits over temperature, p = softmax(z), u one-hot of the token, H the entropy and (g, e) what the loss sends
back to (log p[token], H):
    d/dz = g (u - p) - e p (log p + H)
The backward starts with the chunk whose logits the forward formed last, and forms the others again: up to one matmul in
four more than keeping them all, and no [T, V] tensor. What passes over the rows of a chunk is an argument: torch here,
Triton in kernel.py.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from megatron_rl_kernels.vocabulary import (
    GradientSums,
    HeadCall,
    HeadShard,
    check_head,
    chunks,
    default_chunk,
    reduce_max,
    reduce_sum,
    row_tiles,
    tile_scratch,
)
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup


class LogprobOut(NamedTuple):
    """Per token, natural logs, float32."""

    logp: Tensor
    """[T]: log-prob of the token."""
    entropy: Tensor
    """[T]: of the whole distribution."""


class RowStats(NamedTuple):
    """What one vocabulary shard says about each token; float32, one entry per row."""

    peak: Tensor
    """Largest z."""
    total: Tensor
    """Sum of exp(z - peak)."""
    mean: Tensor
    """Mean of z - peak under the shard's own softmax."""


class Softmax(NamedTuple):
    """The whole distribution of each token as one shard uses it; float64, one entry per row."""

    peak: Tensor
    """Largest z of all shards."""
    log_total: Tensor
    """log of the sum of exp(z - peak) over all shards."""
    log_share: Tensor
    """log of this shard's share of probability."""
    entropy: Tensor

    def at(self, rows: slice) -> "Softmax":
        return Softmax(*(entries[rows] for entries in self))


class RowPasses(NamedTuple):
    """The two passes over a chunk of logits, [c, V] float32."""

    stats: Callable[[Tensor], RowStats]
    """May change a row of the logits by a constant."""
    gradient: Callable[[Tensor, Softmax, Tensor, Tensor | None], None]
    """(logits, softmax, g, e or None for 0): replaces logits by -g p - e p (log p + H). The logits are as stats left
    them, or formed again."""


def reference_linear_logprob(
    hidden_TH: Tensor,
    head_VH: Tensor,
    token_ids: Tensor,
    *,
    vocab_start: int,
    group: ProcessGroup | None,
    temperature: float,
    chunk: int | None,
    passes: RowPasses | None = None,
) -> LogprobOut:
    """See megatron_rl_kernels.linear_logprob. passes None: plain torch."""
    check_head(hidden_TH, head_VH, vocab_start=vocab_start, temperature=temperature, chunk=chunk)
    if token_ids.shape != hidden_TH.shape[:1] or token_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"token_ids must be int32 or int64 [T], one per row of hidden ({len(hidden_TH)}), got {token_ids.dtype} "
            f"{list(token_ids.shape)}; pass the targets, already shifted"
        )
    call = HeadCall(
        group,
        temperature,
        chunk or default_chunk(len(head_VH), hidden_TH.device.type),
        passes or RowPasses(_row_stats, _row_gradient),
    )
    return LogprobOut(*_LinearLogprob.apply(hidden_TH, head_VH, token_ids.long() - vocab_start, call))


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_TH: Tensor, head_VH: Tensor, local_ids: Tensor, call: HeadCall[RowPasses]
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        shard = HeadShard.of(hidden_TH, head_VH, call.temperature)
        columns, here = _columns(local_ids, len(head_VH))
        buffer = shard.buffer(call.chunk)
        peak, total, mean, taken = buffer.new_empty(4, len(hidden_TH))
        for rows in chunks(len(hidden_TH), call.chunk):
            logits = shard.logits(rows, buffer)
            taken[rows] = logits.gather(1, columns[rows]).squeeze(1)
            peak[rows], total[rows], mean[rows] = call.passes.stats(logits)
        stats = RowStats(peak, total, mean)
        logp, softmax = _merge_shards(stats, torch.where(here, taken, 0.0), here, call.group)
        ctx.save_for_backward(hidden_TH, head_VH, local_ids, *softmax)
        ctx.call = call
        # The last chunk's logits. The backward overwrites them; a second one forms them again.
        ctx.buffer = buffer
        return logp.float(), softmax.entropy.float()

    @staticmethod
    @once_differentiable  # pyright takes its ctx for positional-only
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden_TH, head_VH, local_ids, *entries = ctx.saved_tensors
        softmax, call = Softmax(*entries), ctx.call
        by_logp, by_entropy = grads
        by_logp = torch.zeros_like(softmax.entropy, dtype=torch.float32) if by_logp is None else by_logp
        shard = HeadShard.of(hidden_TH, head_VH, call.temperature)
        sums = GradientSums(shard, hidden=ctx.needs_input_grad[0], head=ctx.needs_input_grad[1])
        columns, here = _columns(local_ids, len(head_VH))
        by_taken = torch.where(here, by_logp, 0.0)[:, None]
        buffer, ctx.buffer = ctx.buffer, None
        formed = buffer is not None
        buffer = buffer if formed else shard.buffer(call.chunk)
        for rows in reversed(chunks(len(hidden_TH), call.chunk)):
            logits = buffer[: rows.stop - rows.start] if formed else shard.logits(rows, buffer)
            formed = False
            call.passes.gradient(
                logits, softmax.at(rows), by_logp[rows], None if by_entropy is None else by_entropy[rows]
            )
            sums.add(rows, logits.scatter_add_(1, columns[rows], by_taken[rows]))
        by_hidden, by_head = sums.finish(call.group, hidden_dtype=hidden_TH.dtype, head_dtype=head_VH.dtype)
        return by_hidden, by_head, None, None


def _columns(local_ids: Tensor, shard_size: int) -> tuple[Tensor, Tensor]:
    """(column of each token in this shard or any, [T, 1]; whether the shard holds it, [T])."""
    here = (local_ids >= 0) & (local_ids < shard_size)
    return local_ids.clamp(0, shard_size - 1)[:, None], here


def _merge_shards(stats: RowStats, taken: Tensor, here: Tensor, group: ProcessGroup | None) -> tuple[Tensor, Softmax]:
    """(log-prob, whole distribution) from every shard's stats, z of the token and 1 where it is held, else 0 and 0.

    ValueError: an id without a shard.
    """
    # In float64, which costs nothing here: a shard's share would carry the roundings of every step.
    peak = reduce_max(stats.peak.double(), group)
    shift = stats.peak - peak
    log_mass = shift + stats.total.double().log()
    mass = log_mass.exp()
    sums = reduce_sum(torch.stack([mass, mass * (stats.mean + shift), taken.double(), here.double()]), group)
    total, weighted, taken, owners = sums
    if bool((owners != 1).any()):  # the same sums on every rank: all of them raise, or none
        position = int((owners != 1).nonzero()[0])
        raise ValueError(
            f"every token id must lie in exactly one vocabulary shard, got one in {int(owners[position])} at position "
            f"{position}; check the ids, vocab_start, and that tokenizer and model belong together"
        )
    log_total = total.log()
    return (taken - peak) - log_total, Softmax(peak, log_total, log_mass - log_total, log_total - weighted / total)


def _row_stats(logits_cV: Tensor) -> RowStats:
    """Shifts every row to a largest entry of 0."""
    stats = RowStats(*logits_cV.new_empty(3, len(logits_cV)))
    scratch = tile_scratch(logits_cV)
    for rows in row_tiles(logits_cV):
        z = logits_cV[rows]
        torch.amax(z, dim=1, out=stats.peak[rows])
        z.sub_(stats.peak[rows, None])
        # On CPUs torch's softmax is five times faster than its exp. Its largest entry is 1 over the sum of exp.
        probs = torch.softmax(z, dim=1, out=scratch[: len(z)])
        stats.total[rows] = probs.amax(dim=1).reciprocal_()
        torch.sum(probs.mul_(z), dim=1, out=stats.mean[rows])
    return stats


def _row_gradient(logits_cV: Tensor, softmax: Softmax, by_logp: Tensor, by_entropy: Tensor | None) -> None:
    share = softmax.log_share.exp()
    scratch = tile_scratch(logits_cV)
    by_logp = (by_logp * share).float()[:, None]
    for rows in row_tiles(logits_cV):
        z = logits_cV[rows]
        probs = torch.softmax(z, dim=1, out=scratch[: len(z)])
        if by_entropy is None:
            torch.mul(probs, -by_logp[rows], out=z)
            continue
        # log p + H, from the peak downwards: where p is large, log p must keep its digits.
        z.sub_(z.amax(dim=1, keepdim=True))
        z.add_((probs.amax(dim=1).double().log_() + softmax.log_share[rows] + softmax.entropy[rows]).float()[:, None])
        z.mul_((-by_entropy[rows] * share[rows]).float()[:, None]).sub_(by_logp[rows]).mul_(probs)
