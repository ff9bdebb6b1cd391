"""Log-probs and entropies of a linear head without its logits: dispatch over implementations."""

from megatron_rl_kernels.dispatch import Impl, takes_kernel
from megatron_rl_kernels.linear_logprob.reference import LogprobOut, reference_linear_logprob
from megatron_rl_kernels.vocabulary import default_chunk
from torch import Tensor
from torch.distributed import ProcessGroup

__all__ = ["LogprobOut", "default_chunk", "linear_logprob"]


def linear_logprob(
    hidden_TH: Tensor,
    head_VH: Tensor,
    token_ids: Tensor,
    *,
    vocab_start: int = 0,
    group: ProcessGroup | None = None,
    temperature: float = 1.0,
    chunk: int | None = None,
    impl: Impl = "auto",
) -> LogprobOut:
    """log p(token) and entropy of p = softmax(hidden @ head.T / temperature), natural logs, float32. [T], [T]

    head_VH is sharded over group on V, in shards of any sizes; this rank holds rows vocab_start onwards. hidden_TH and
    token_ids (global ids) are equal on every rank of group, and so are the results. Never holds more than chunk rows
    of logits (chunk None: as many as fit the cache, see vocabulary.py).

    Both results are differentiable, once, in hidden and head. The hidden gradient is summed over group inside the
    backward; the head gradient is this shard's. Every rank of group must run the backward, or none.

    ValueError on every rank: shapes that disagree, temperature or chunk not above 0, vocab_start below 0, a token id
    that no shard holds, an impl that is unknown or cannot run here.
    """
    passes = None
    if takes_kernel(impl, hidden_TH.device):
        from megatron_rl_kernels.linear_logprob.kernel import TRITON_PASSES as passes
    return reference_linear_logprob(
        hidden_TH,
        head_VH,
        token_ids,
        vocab_start=vocab_start,
        group=group,
        temperature=temperature,
        chunk=chunk,
        passes=passes,
    )
