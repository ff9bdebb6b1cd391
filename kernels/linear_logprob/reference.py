"""The contract in plain torch, and the path on the CPU: token chunks, float32, vocabulary shards.

With z the logits over temperature, p = softmax(z), u one-hot of the token, H the entropy and (g, e) what the loss sends
back to (log p[token], H):
    d/dz = g (u - p) - e p (log p + H)
The backward forms z again, chunk by chunk: one matmul more than keeping it, and no [T, V] tensor.
Low-precision inputs are taken to float32 before the matmul (their products are exact there), so the only rounding to
the input's precision is that of the gradients returned.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

_CHUNK_ELEMENTS = {"cpu": 2**19, "cuda": 2**27}
"""Logits held at a time: on the CPU 2 MiB, so that the passes over them stay in cache."""
_LEAST_CHUNK = 64
"""Rows below which the matmul itself gets slow, however large V is."""


class LogprobOut(NamedTuple):
    """Per token, natural logs, float32."""

    logp: Tensor
    """[T]: log-prob of the token, never above 0."""
    entropy: Tensor
    """[T]: of the whole distribution."""


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
        budget = _CHUNK_ELEMENTS.get(hidden_TH.device.type, _CHUNK_ELEMENTS["cuda"])
        chunk = max(_LEAST_CHUNK, budget // head_VH.shape[0])
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
        local_ids = token_ids - vocab_start
        stats = _shard_stats(hidden_TH, head_VH, local_ids, inverse_temperature, chunk)
        logp, entropy, log_normaliser = _merge_shards(*stats, group)
        ctx.save_for_backward(hidden_TH, head_VH, local_ids, log_normaliser, entropy)
        ctx.group, ctx.inverse_temperature, ctx.chunk = group, inverse_temperature, chunk
        return logp, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_TH, head_VH, local_ids, log_normaliser, entropy = ctx.saved_tensors
        grad_logp, grad_entropy = grads
        if grad_logp is None:
            grad_logp = torch.zeros_like(log_normaliser)
        head32_VH = head_VH.float()
        needs_hidden, needs_head = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden_TH, dtype=torch.float32) if needs_hidden else None
        grad_head = torch.zeros_like(head32_VH) if needs_head else None
        for rows in _chunks(len(hidden_TH), ctx.chunk):
            hidden32 = hidden_TH[rows].float()
            slope = _logit_gradient(
                _logits(hidden32, head32_VH, ctx.inverse_temperature).sub_(log_normaliser[rows, None]),
                local_ids[rows],
                grad_logp[rows],
                None if grad_entropy is None else grad_entropy[rows],
                entropy[rows],
            )
            if grad_hidden is not None:
                torch.mm(slope, head32_VH, out=grad_hidden[rows])
            if grad_head is not None:
                grad_head.addmm_(slope.t(), hidden32, alpha=ctx.inverse_temperature)
        if grad_hidden is not None:
            grad_hidden.mul_(ctx.inverse_temperature)
            if ctx.group is not None and len(hidden_TH):
                dist.all_reduce(grad_hidden, group=ctx.group)
            grad_hidden = grad_hidden.to(hidden_TH.dtype)
        if grad_head is not None:
            grad_head = grad_head.to(head_VH.dtype)
        return grad_hidden, grad_head, None, None, None, None, None


def _shard_stats(
    hidden_TH: Tensor, head_VH: Tensor, local_ids: Tensor, inverse_temperature: float, chunk: int
) -> tuple[Tensor, Tensor]:
    """(largest logit m [T], sums [4, T]) of this shard.

    sums: exp(z - m), exp(z - m) (z - m), the token's z (0 if not here), whether the token is here.
    """
    peak = hidden_TH.new_empty(len(hidden_TH), dtype=torch.float32)
    sums = peak.new_empty(4, len(peak))
    head32_VH = head_VH.float()
    shard_size = len(head_VH)
    sums[3] = (local_ids >= 0) & (local_ids < shard_size)
    for rows in _chunks(len(peak), chunk):
        logits = _logits(hidden_TH[rows].float(), head32_VH, inverse_temperature)
        taken = logits.gather(1, local_ids[rows, None].clamp(0, shard_size - 1)).squeeze(1)
        sums[2, rows] = torch.where(sums[3, rows] > 0, taken, 0.0)
        torch.amax(logits, dim=1, out=peak[rows])
        logits.sub_(peak[rows, None])
        weights = logits.exp()
        torch.sum(weights, dim=1, out=sums[0, rows])
        torch.sum(weights.mul_(logits), dim=1, out=sums[1, rows])
    return peak, sums


def _merge_shards(
    shard_peak: Tensor, sums: Tensor, group: ProcessGroup | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(log-prob, entropy, log of the sum of exp z), [T] each, over all shards. ValueError for an id without a shard."""
    peak = shard_peak
    if group is not None and len(peak):
        peak = shard_peak.clone()
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
        shift = shard_peak - peak
        sums[1] += shift * sums[0]
        sums[:2] *= shift.exp()
        dist.all_reduce(sums, group=group)
    total, weighted, taken, owners = sums
    # Every rank sees the same sum, so all of them raise.
    if bool((owners != 1).any()):
        row = int((owners != 1).nonzero()[0])
        raise ValueError(
            f"token_ids must lie in exactly one vocabulary shard, got one at position {row} that lies in "
            f"{int(owners[row])}; check the ids, vocab_start and that the tokenizer fits the model"
        )
    log_total = total.log()
    return taken - peak - log_total, log_total - weighted / total, peak + log_total


def _logit_gradient(
    logp_cV: Tensor, local_ids: Tensor, grad_logp: Tensor, grad_entropy: Tensor | None, entropy: Tensor
) -> Tensor:
    """d loss / d z of one chunk, [c, V] of this shard. Overwrites logp_cV."""
    if grad_entropy is None:
        slope = logp_cV.exp_().mul_(-grad_logp[:, None])
    else:
        # -p (g + e (log p + H)); where p underflows to 0, log p is still finite.
        probs = logp_cV.exp()
        slope = logp_cV.add_(entropy[:, None]).mul_(grad_entropy[:, None]).add_(grad_logp[:, None]).mul_(probs).neg_()
    here = (local_ids >= 0) & (local_ids < slope.shape[1])
    columns = local_ids.clamp(0, slope.shape[1] - 1)
    slope.scatter_add_(1, columns[:, None], torch.where(here, grad_logp, 0.0)[:, None])
    return slope


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
    if token_ids.shape != hidden_TH.shape[:1] or token_ids.is_floating_point():
        raise ValueError(
            f"token_ids must be integers [T], one per row of hidden ({len(hidden_TH)}), got {token_ids.dtype} "
            f"{list(token_ids.shape)}; pass the targets, already shifted"
        )
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, got {temperature}; 1 is the model's own distribution")
    if vocab_start < 0:
        raise ValueError(f"vocab_start must not be negative, got {vocab_start}; it is the first row of this shard")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk must be at least 1 token, got {chunk}; None chooses by the size of the cache")
