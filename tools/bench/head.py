"""The log-prob head against log_softmax over materialised logits."""

import statistics
import time
from collections.abc import Callable

import torch
from megatron_rl_kernels import linear_logprob


def measure(
    num_tokens: int, hidden: int, vocabulary: int, *, dtype: torch.dtype, rounds: int
) -> tuple[float, float, float]:
    """(median seconds of ours, of plain, median of the pairwise ratio plain / ours), forward and backward.

    Ours computes entropies as well. Plain takes low-precision logits to float32 before the softmax, as losses do.
    """
    torch.manual_seed(0)
    states = torch.randn(num_tokens, hidden).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, hidden).mul_(hidden**-0.5).to(dtype).requires_grad_()
    ids = torch.randint(0, vocabulary, (num_tokens,))

    def ours() -> None:
        linear_logprob(states, weight, ids).logp.sum().backward()

    def plain() -> None:
        torch.log_softmax((states @ weight.T).float(), dim=-1).gather(1, ids[:, None]).sum().backward()

    _seconds(ours)
    _seconds(plain)
    pairs = [(_seconds(ours), _seconds(plain)) for _ in range(rounds)]
    return (
        statistics.median(pair[0] for pair in pairs),
        statistics.median(pair[1] for pair in pairs),
        statistics.median(pair[1] / pair[0] for pair in pairs),
    )


def _seconds(action: Callable[[], None]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started
