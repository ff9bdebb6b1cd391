"""What tests of the linear heads share: textbook heads, inputs, and the error budget of an honest head."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True)
class Case:
    """One call of a head."""

    hidden: Tensor
    """[T, H]"""
    teacher: Tensor
    """[T, H]"""
    head: Tensor
    """[V, H]"""
    token_ids: Tensor
    sends: dict[str, Tensor]
    """What the loss sends back to each result, [T] float32."""

    def rows(self, rows: slice) -> "Case":
        return replace(
            self, hidden=self.hidden[rows], teacher=self.teacher[rows], token_ids=self.token_ids[rows], sends={}
        )


Head = Callable[[Tensor, Tensor, Case, float], dict[str, Tensor]]
"""(hidden, head, the rest, temperature) -> results by name, [T] each."""


def draw(
    num_tokens: int, hidden_size: int, vocab_size: int, dtype: torch.dtype, seed: int = 0, device: str = "cpu"
) -> Case:
    """Distributions from nearly flat to nearly sure, and a teacher near enough to have a KL of about 1."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_tokens, hidden_size, generator=generator)
    head = torch.randn(vocab_size, hidden_size, generator=generator) * 2 / hidden_size**0.5
    token_ids = torch.randint(vocab_size, (num_tokens,), generator=generator)
    teacher = hidden + torch.randn(num_tokens, hidden_size, generator=generator) / 2
    sends = torch.randn(3, num_tokens, generator=generator).to(device)
    return Case(
        hidden.to(device, dtype),
        teacher.to(device, dtype),
        head.to(device, dtype),
        token_ids.to(device),
        dict(zip(("logp", "entropy", "kl"), sends, strict=True)),
    )


class LargestTensor(TorchDispatchMode):
    """Number of elements of the largest tensor that any operator made inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                self.largest = max(self.largest, tensor.numel())
        return out


def textbook_logprob(hidden: Tensor, head: Tensor, case: Case, temperature: float) -> dict[str, Tensor]:
    """All logits, in float32 at least, as engine and trainer keep them; gradients end in the inputs' precision."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    logp = (hidden.to(wide) @ head.to(wide).t() / temperature).log_softmax(-1)
    return {"logp": logp.gather(1, case.token_ids[:, None]).squeeze(1), "entropy": -(logp.exp() * logp).sum(-1)}


def textbook_distill(hidden: Tensor, head: Tensor, case: Case, temperature: float) -> dict[str, Tensor]:
    """As textbook_logprob: KL(teacher || student) from all logits of both."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    logp = (hidden.to(wide) @ head.to(wide).t() / temperature).log_softmax(-1)
    logq = (case.teacher.to(wide) @ head.detach().to(wide).t() / temperature).log_softmax(-1)
    return {"kl": F.kl_div(logp, logq, log_target=True, reduction="none").sum(-1)}


def in_chunks(head_fn: Head, chunk: int) -> Head:
    """head_fn on chunk tokens at a time: a matmul library's rounding depends on the number of rows."""

    def chunked(hidden: Tensor, head: Tensor, case: Case, temperature: float) -> dict[str, Tensor]:
        spans = [slice(start, start + chunk) for start in range(0, max(1, len(hidden)), chunk)]
        parts = [head_fn(hidden[rows], head, case.rows(rows), temperature) for rows in spans]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    return chunked


def run(
    head_fn: Head, case: Case, temperature: float, sends: Sequence[str], dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Results, hidden gradient and head gradient in float64; sends: which results the loss uses; dtype: the inputs'."""
    hidden, head = (leaf.to(dtype or leaf.dtype, copy=True).requires_grad_() for leaf in (case.hidden, case.head))
    results = head_fn(hidden, head, case, temperature)
    torch.stack([results[name] @ case.sends[name].to(results[name].dtype) for name in sends]).sum().backward()
    assert hidden.grad is not None and head.grad is not None
    return {name: out.detach().double() for name, out in (results | {"hidden": hidden.grad, "head": head.grad}).items()}


def pooled(runs: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The entries of several runs in one row per name."""
    return {name: torch.cat([one[name].flatten() for one in runs]) for name in runs[0]}


def budgets(exact: dict[str, Tensor], honest: dict[str, Tensor], dtype: torch.dtype) -> dict[str, float]:
    """Twice the honest head's largest error, by name; dtype: the inputs'.

    One rounding of the largest entry is added, for small sizes whose honest error is zero by luck.
    """
    allowed = {}
    for name, want in exact.items():
        rounding = torch.finfo(dtype if name in ("hidden", "head") else torch.float32).eps
        if want.numel():
            allowed[name] = float(2 * (honest[name] - want).abs().max() + rounding * want.abs().max())
    return allowed


def over_budget(exact: dict[str, Tensor], got: dict[str, Tensor], allowed: dict[str, float]) -> dict[str, float]:
    """Largest errors as multiples of what is allowed, where they are above, or no number."""
    assert all(got[name].shape == want.shape for name, want in exact.items())
    errors = {name: float((got[name] - exact[name]).abs().max()) for name in allowed}
    return {name: error / allowed[name] for name, error in errors.items() if not error <= allowed[name]}
