"""The contract in plain torch, and the path on the CPU: token chunks, float32, vocabulary shards.

With z and y the logits of student and teacher over temperature, p = softmax(z), q = softmax(y) and g what the loss
sends back to KL(q || p):
    d/dz = g (p - q)
Over vocabulary shards that hold the shares P_s and Q_s of probability, KL adds up by the chain rule:
    KL(q || p) = sum_s Q_s (KL(q || p) within s + log Q_s - log P_s)
As in linear_logprob the backward forms the logits of all chunks but one again.
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


class PairStats(NamedTuple):
    """What one vocabulary shard says about the two distributions of each token; float32, one entry per row."""

    student_peak: Tensor
    """Largest z."""
    student_total: Tensor
    """Sum of exp(z - student_peak)."""
    teacher_peak: Tensor
    teacher_total: Tensor
    kl: Tensor
    """KL(q || p) of the shard's own two softmaxes."""


class PairSoftmax(NamedTuple):
    """Both whole distributions of each token as one shard uses them; float64, one entry per row."""

    student_peak: Tensor
    """Largest z of all shards."""
    student_log_total: Tensor
    """log of the sum of exp(z - student_peak) over all shards."""
    student_log_share: Tensor
    """log of this shard's share of probability."""
    teacher_peak: Tensor
    teacher_log_total: Tensor
    teacher_log_share: Tensor

    def at(self, rows: slice) -> "PairSoftmax":
        return PairSoftmax(*(entries[rows] for entries in self))


class PairPasses(NamedTuple):
    """The two passes over a chunk of logits, student's and teacher's, [c, V] float32 each."""

    stats: Callable[[Tensor, Tensor], PairStats]
    """May change a row of either by a constant."""
    gradient: Callable[[Tensor, Tensor, PairSoftmax, Tensor], None]
    """(student's, teacher's, softmax, g): replaces the student's logits by g (p - q) and may overwrite the teacher's.
    The logits are as stats left them, or formed again."""


def reference_linear_distill(
    student_TH: Tensor,
    teacher_TH: Tensor,
    head_VH: Tensor,
    *,
    vocab_start: int,
    group: ProcessGroup | None,
    temperature: float,
    chunk: int | None,
    teacher_head_VH: Tensor | None,
    passes: PairPasses | None = None,
) -> Tensor:
    """See megatron_rl_kernels.linear_distill. passes None: plain torch."""
    limits: dict[str, Any] = {"vocab_start": vocab_start, "temperature": temperature, "chunk": chunk}
    check_head(student_TH, head_VH, name="student", **limits)
    teacher_head_VH = head_VH if teacher_head_VH is None else teacher_head_VH
    check_head(teacher_TH, teacher_head_VH, name="teacher", **limits)
    if len(student_TH) != len(teacher_TH) or len(head_VH) != len(teacher_head_VH):
        raise ValueError(
            f"student and teacher must have the same tokens and rows of the vocabulary, got {len(student_TH)} and "
            f"{len(teacher_TH)} tokens, {len(head_VH)} and {len(teacher_head_VH)} rows; pair the states of equal tokens"
        )
    call = HeadCall(
        group,
        temperature,
        chunk or default_chunk(len(head_VH), student_TH.device.type),
        passes or PairPasses(_pair_stats, _pair_gradient),
    )
    return _LinearDistill.apply(student_TH, head_VH, teacher_TH.detach(), teacher_head_VH.detach(), call)


class _LinearDistill(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        student_TH: Tensor,
        head_VH: Tensor,
        teacher_TH: Tensor,
        teacher_head_VH: Tensor,
        call: HeadCall[PairPasses],
    ) -> Tensor:
        student = HeadShard.of(student_TH, head_VH, call.temperature)
        teacher = HeadShard.of(teacher_TH, teacher_head_VH, call.temperature)
        buffers = student.buffer(call.chunk), teacher.buffer(call.chunk)
        stats = PairStats(*buffers[0].new_empty(5, len(student_TH)))
        for rows in chunks(len(student_TH), call.chunk):
            of_chunk = call.passes.stats(student.logits(rows, buffers[0]), teacher.logits(rows, buffers[1]))
            for entries, ours in zip(stats, of_chunk, strict=True):
                entries[rows] = ours
        kl, softmax = _merge_shards(stats, call.group)
        ctx.save_for_backward(student_TH, head_VH, teacher_TH, teacher_head_VH, *softmax)
        ctx.call = call
        # The last chunk's logits. The backward overwrites them; a second one forms them again.
        ctx.buffers = buffers
        return kl

    @staticmethod
    @once_differentiable  # pyright takes its ctx for positional-only
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, by_kl: Tensor
    ) -> tuple[Tensor | None, ...]:
        student_TH, head_VH, teacher_TH, teacher_head_VH, *entries = ctx.saved_tensors
        softmax, call = PairSoftmax(*entries), ctx.call
        student = HeadShard.of(student_TH, head_VH, call.temperature)
        teacher = HeadShard.of(teacher_TH, teacher_head_VH, call.temperature)
        sums = GradientSums(student, hidden=ctx.needs_input_grad[0], head=ctx.needs_input_grad[1])
        buffers, ctx.buffers = ctx.buffers, None
        formed = buffers is not None
        buffers = buffers if formed else (student.buffer(call.chunk), teacher.buffer(call.chunk))
        for rows in reversed(chunks(len(student_TH), call.chunk)):
            if formed:
                z, y = (buffer[: rows.stop - rows.start] for buffer in buffers)
            else:
                z, y = student.logits(rows, buffers[0]), teacher.logits(rows, buffers[1])
            formed = False
            call.passes.gradient(z, y, softmax.at(rows), by_kl[rows])
            sums.add(rows, z)
        by_student, by_head = sums.finish(call.group, hidden_dtype=student_TH.dtype, head_dtype=head_VH.dtype)
        return by_student, by_head, None, None, None


def _merge_shards(stats: PairStats, group: ProcessGroup | None) -> tuple[Tensor, PairSoftmax]:
    """(KL, whole distributions) from every shard's stats."""
    # In float64, which costs nothing here: a shard's share would carry the roundings of every step.
    own_peaks = torch.stack([stats.student_peak, stats.teacher_peak]).double()
    peaks = reduce_max(own_peaks, group)
    log_mass = own_peaks - peaks + torch.stack([stats.student_total, stats.teacher_total]).double().log()
    log_total = reduce_sum(log_mass.exp(), group).log()
    log_share = log_mass - log_total
    kl = reduce_sum(log_share[1].exp() * (stats.kl + log_share[1] - log_share[0]), group)
    softmax = PairSoftmax(peaks[0], log_total[0], log_share[0], peaks[1], log_total[1], log_share[1])
    return kl.clamp_(min=0.0).float(), softmax  # by rounding alone it is below 0


def _pair_stats(student_cV: Tensor, teacher_cV: Tensor) -> PairStats:
    """Shifts every row of both to a largest entry of 0."""
    stats = PairStats(*student_cV.new_empty(5, len(student_cV)))
    scratch, difference = tile_scratch(student_cV), tile_scratch(student_cV)
    for rows in row_tiles(student_cV):
        z, y = student_cV[rows], teacher_cV[rows]
        for logits, peak, total in ((z, stats[0], stats[1]), (y, stats[2], stats[3])):
            torch.amax(logits, dim=1, out=peak[rows])
            logits.sub_(peak[rows, None])
            # On CPUs torch's softmax is five times faster than its exp. Its largest entry is 1 over the sum of exp.
            probs = torch.softmax(logits, dim=1, out=scratch[: len(logits)])
            total[rows] = probs.amax(dim=1).reciprocal_()
        probs = scratch[: len(y)]  # the teacher's
        log_ratio = torch.sub(y, z, out=difference[: len(y)])
        log_ratio.add_((stats.student_total[rows] / stats.teacher_total[rows]).log_()[:, None])
        torch.sum(probs.mul_(log_ratio), dim=1, out=stats.kl[rows])
    return stats


def _pair_gradient(student_cV: Tensor, teacher_cV: Tensor, softmax: PairSoftmax, by_kl: Tensor) -> None:
    log_shares = softmax.student_log_share, softmax.teacher_log_share
    student_share, teacher_share = (log_share.exp().float()[:, None] for log_share in log_shares)
    p_room, q_room = tile_scratch(student_cV), tile_scratch(student_cV)
    for rows in row_tiles(student_cV):
        z, y = student_cV[rows], teacher_cV[rows]
        p = torch.softmax(z, dim=1, out=p_room[: len(z)]).mul_(student_share[rows])
        q = torch.softmax(y, dim=1, out=q_room[: len(y)]).mul_(teacher_share[rows])
        torch.sub(p, q, out=z).mul_(by_kl[rows, None])  # g last: where p is near q, their difference is exact
