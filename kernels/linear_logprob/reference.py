"""The contract in plain torch, and the path on the CPU: token chunks, float32, vocabulary shards.

With z the logits over temperature, p = softmax(z), u one-hot of the token, H the entropy and (g, e) what the loss sends
back to (log p[token], H):
    d/dz = g (u - p) - e p (log p + H)
The backward starts with the chunk whose logits the forward formed last, and forms the others again: up to one matmul in
four more than keeping them all, and no [T, V] tensor.
Low-precision inputs are taken to float32 in front of the matmul, where their products are exact: what is rounded to the
inputs' precision is the gradients, once.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

_CHUNK_ELEMENTS = {"cpu": 2**23, "cuda": 2**27}
"""Logits formed at a time: 32 MiB on the CPU, where fewer rows slow the head's gradient down; 512 MiB on GPUs."""
_LEAST_CHUNK = 128
"""Rows below which the matmuls themselves get slow, however large V is."""


class LogprobOut(NamedTuple):
    """Per token, natural logs, float32."""

    logp: Tensor
    """[T]: log-prob of the token."""
    entropy: Tensor
    """[T]: of the whole distribution."""


def default_chunk(num_rows_V: int, device_type: str) -> int:
    """Tokens whose logits are formed at a time against so many rows of the head."""
    budget = _CHUNK_ELEMENTS.get(device_type, _CHUNK_ELEMENTS["cuda"])
    return max(_LEAST_CHUNK, budget // num_rows_V)


def reference_linear_logprob(
    hidden_TH: Tensor,
    head_VH: Tensor,
    token_ids: Tensor,
    *,
    vocab_start: int,
    group: ProcessGroup | None,
    temperature: float,
    chunk: int | None,
) -> LogprobOut:
    """See megatron_rl_kernels.linear_logprob."""
    _check_arguments(hidden_TH, head_VH, token_ids, vocab_start, temperature, chunk)
    if chunk is None:
        chunk = default_chunk(len(head_VH), hidden_TH.device.type)
    logp, entropy = _LinearLogprob.apply(hidden_TH, head_VH, token_ids, vocab_start, group, 1.0 / temperature, chunk)
    return LogprobOut(logp, entropy)


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        head_VH: Tensor,
        token_ids: Tensor,
        vocab_start: int,
        group: ProcessGroup | None,
        inverse_temperature: float,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        local_ids = token_ids.long() - vocab_start
        stats, last_logits = _shard_stats(hidden_TH, head_VH, local_ids, inverse_temperature, chunk)
        logp, entropy, log_share = _merge_shards(stats, group)
        ctx.save_for_backward(hidden_TH, head_VH, local_ids, log_share, entropy, last_logits)
        ctx.group, ctx.inverse_temperature, ctx.chunk = group, inverse_temperature, chunk
        return logp, entropy

    @staticmethod
    @once_differentiable  # pyright takes its ctx for positional-only
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden_TH, head_VH, local_ids, log_share, entropy, logits = ctx.saved_tensors
        grad_logp, grad_entropy = grads
        grad_logp = torch.zeros_like(log_share) if grad_logp is None else grad_logp
        head32_VH = head_VH.float()
        needs_hidden, needs_head = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden_TH, dtype=torch.float32) if needs_hidden else None
        grad_head = torch.zeros_like(head32_VH) if needs_head else None
        scratch = torch.empty(min(ctx.chunk, len(hidden_TH)), len(head_VH), device=head_VH.device)
        for rows in reversed(_chunks(len(hidden_TH), ctx.chunk)):
            hidden32 = hidden_TH[rows].float()
            if logits is None:
                with _products_in(hidden_TH.dtype, head_VH.dtype):
                    logits = _logits(hidden32, head32_VH, ctx.inverse_temperature)
            row_entropy = None if grad_entropy is None else (grad_entropy[rows], entropy[rows])
            slope = _logit_gradient(logits, local_ids[rows], log_share[rows], grad_logp[rows], row_entropy, scratch)
            if grad_hidden is not None:
                torch.mm(slope, head32_VH, out=grad_hidden[rows])
            if grad_head is not None:
                grad_head.addmm_(slope.t(), hidden32, alpha=ctx.inverse_temperature)
            logits = None
        if grad_hidden is not None:
            grad_hidden.mul_(ctx.inverse_temperature)
            if ctx.group is not None and len(hidden_TH):
                dist.all_reduce(grad_hidden, group=ctx.group)
            grad_hidden = grad_hidden.to(hidden_TH.dtype)
        if grad_head is not None:
            grad_head = grad_head.to(head_VH.dtype)
        return grad_hidden, grad_head, None, None, None, None, None


class _ShardStats(NamedTuple):
    """What one vocabulary shard says about each token; [T], float32."""

    peak: Tensor
    """Largest z."""
    log_sum: Tensor
    """log of the sum of exp(z - peak)."""
    mean: Tensor
    """Mean of z - peak under the shard's own softmax."""
    taken: Tensor
    """z of the token; 0 if the shard does not hold it."""
    here: Tensor
    """1 if the shard holds the token, else 0."""


def _shard_stats(
    hidden_TH: Tensor, head_VH: Tensor, local_ids: Tensor, inverse_temperature: float, chunk: int
) -> tuple[_ShardStats, Tensor]:
    """(stats, logits of the last chunk up to one constant per row)."""
    num_tokens, shard_size = len(hidden_TH), len(head_VH)
    here = (local_ids >= 0) & (local_ids < shard_size)
    columns = local_ids.clamp(0, shard_size - 1)[:, None]
    head32_VH = head_VH.float()
    peak, log_sum, mean, taken = head32_VH.new_empty(4, num_tokens)
    logits = head32_VH.new_empty(0, shard_size)
    scratch = head32_VH.new_empty(min(chunk, num_tokens), shard_size)
    for rows in _chunks(num_tokens, chunk):
        with _products_in(hidden_TH.dtype, head_VH.dtype):
            logits = _logits(hidden_TH[rows].float(), head32_VH, inverse_temperature)
        taken[rows] = logits.gather(1, columns[rows]).squeeze(1)
        torch.amax(logits, dim=1, out=peak[rows])
        logits.sub_(peak[rows, None])
        # On CPUs torch's softmax is five times faster than its exp. Its largest entry is 1 over the sum of exp.
        probs = torch.softmax(logits, dim=1, out=scratch[: len(logits)])
        log_sum[rows] = -probs.amax(dim=1).log_()
        torch.sum(probs.mul_(logits), dim=1, out=mean[rows])
    return _ShardStats(peak, log_sum, mean, torch.where(here, taken, 0.0), here.float()), logits


def _merge_shards(stats: _ShardStats, group: ProcessGroup | None) -> tuple[Tensor, Tensor, Tensor]:
    """(log-prob, entropy, log of this shard's share of probability), [T] each. ValueError: an id without a shard."""
    peak = stats.peak
    if group is not None and len(peak):
        peak = peak.clone()
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
    shift = stats.peak - peak
    log_mass = shift + stats.log_sum
    mass = log_mass.exp()
    sums = torch.stack([mass, mass * (stats.mean + shift), stats.taken, stats.here])
    if group is not None and len(peak):
        dist.all_reduce(sums, group=group)
    total, weighted, taken, owners = sums
    if bool((owners != 1).any()):  # the same sums on every rank: all of them raise, or none
        position = int((owners != 1).nonzero()[0])
        raise ValueError(
            f"every token id must lie in exactly one vocabulary shard, got one in {int(owners[position])} at position "
            f"{position}; check the ids, vocab_start, and that tokenizer and model belong together"
        )
    log_total = total.log()
    return (taken - peak) - log_total, log_total - weighted / total, log_mass - log_total


def _logit_gradient(
    logits_cV: Tensor,
    local_ids: Tensor,
    log_share: Tensor,
    grad_logp: Tensor,
    entropy: tuple[Tensor, Tensor] | None,
    scratch: Tensor,
) -> Tensor:
    """d loss / d z of one chunk in this shard, [c, V]. entropy: (what the loss sends back to it, its value), or None.

    logits may be off by a constant per row; scratch is overwritten.
    """
    probs = torch.softmax(logits_cV, dim=1, out=scratch[: len(logits_cV)])
    share = log_share.exp()
    if entropy is None:
        slope = probs.mul_((-grad_logp * share)[:, None])
    else:
        grad_entropy, value = entropy
        # log p + H, from the peak downwards: where p is large, log p must keep its digits.
        slope = logits_cV - logits_cV.amax(dim=1, keepdim=True)
        slope.add_((probs.amax(dim=1).log_() + log_share + value)[:, None])
        slope.mul_((-grad_entropy * share)[:, None]).sub_((grad_logp * share)[:, None]).mul_(probs)
    shard_size = slope.shape[1]
    here = (local_ids >= 0) & (local_ids < shard_size)
    columns = local_ids.clamp(0, shard_size - 1)[:, None]
    return slope.scatter_add_(1, columns, torch.where(here, grad_logp, 0.0)[:, None])


@contextlib.contextmanager
def _products_in(*dtypes: torch.dtype) -> Iterator[None]:
    """On CPUs, float32 products of values that all came from bfloat16 by its matrix units: as exact, and faster.

    They take float32 to bfloat16, which changes none of these values, and add up in float32. For GPUs it says nothing.
    """
    onednn: Any = torch.backends.mkldnn
    matmul, before = onednn.matmul, onednn.matmul.fp32_precision
    if all(dtype == torch.bfloat16 for dtype in dtypes):
        matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def _logits(hidden_cH: Tensor, head_VH: Tensor, inverse_temperature: float) -> Tensor:
    out = hidden_cH.new_empty(len(hidden_cH), len(head_VH))
    return torch.addmm(out, hidden_cH, head_VH.t(), beta=0, alpha=inverse_temperature, out=out)


def _chunks(num_tokens: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, num_tokens)) for start in range(0, num_tokens, chunk)]


def _check_arguments(
    hidden_TH: Tensor, head_VH: Tensor, token_ids: Tensor, vocab_start: int, temperature: float, chunk: int | None
) -> None:
    if hidden_TH.dim() != 2 or head_VH.dim() != 2 or hidden_TH.shape[1] != head_VH.shape[1] or not len(head_VH):
        raise ValueError(
            f"hidden must be [T, H] and head [V, H] with one H and V at least 1, got {list(hidden_TH.shape)} and "
            f"{list(head_VH.shape)}; flatten batch dimensions first"
        )
    if token_ids.shape != hidden_TH.shape[:1] or token_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"token_ids must be int32 or int64 [T], one per row of hidden ({len(hidden_TH)}), got {token_ids.dtype} "
            f"{list(token_ids.shape)}; pass the targets, already shifted"
        )
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, got {temperature}; 1 is the model's own distribution")
    if vocab_start < 0:
        raise ValueError(f"vocab_start must not be negative, got {vocab_start}; it is the first row of this shard")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk must be at least 1 token, got {chunk}; None chooses by the size of the cache")
