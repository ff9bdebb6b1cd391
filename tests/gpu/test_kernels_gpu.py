"""The heads' Triton kernels on one GPU: against the textbook in float64, and against the reference at a real size."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_rl_kernels import linear_distill, linear_logprob
from megatron_rl_kernels.dispatch import takes_kernel

TESTS = Path(__file__).parents[1]
HEADS = runpy.run_path(str(TESTS / "heads.py"))
SIZE = (1500, 256, 151936)
"""(T, H, V): two chunks and a rest of a vocabulary of today."""


def both_heads(case: Any, impl: str) -> dict[str, torch.Tensor]:
    """Results, and gradients of their sum, weighted as case.sends says."""
    hidden, head = case.hidden.clone().requires_grad_(), case.head.clone().requires_grad_()
    options: dict[str, Any] = {"temperature": 0.8, "impl": impl}
    results = linear_logprob(hidden, head, case.token_ids, **options)._asdict()
    results["kl"] = linear_distill(hidden, case.teacher, head, **options)
    torch.stack([results[name] @ by for name, by in case.sends.items()]).sum().backward()
    assert hidden.grad is not None and head.grad is not None
    return {name: out.detach() for name, out in (results | {"hidden": hidden.grad, "head": head.grad}).items()}


def test_cuda_takes_the_kernel() -> None:
    assert takes_kernel("auto", torch.device("cuda")) and not takes_kernel("auto", torch.device("cpu"))


def test_kernels_stay_in_the_error_budget_of_the_heads(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(TESTS / "check_kernels.py"))["main"]("cuda")
    assert "in budget: 34 cases" in capsys.readouterr().out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernel_and_reference_agree_at_a_real_size(dtype: torch.dtype) -> None:
    case = HEADS["draw"](*SIZE, dtype, device="cuda")
    reference, kernel = both_heads(case, "reference"), both_heads(case, "kernel")
    for name, want in reference.items():
        accurate = 1e-5 if name in case.sends or dtype is torch.float32 else 2**-7
        assert (kernel[name] - want).abs().max() <= accurate * want.abs().max(), name


def test_the_backward_needs_one_chunk_of_logits_beside_the_gradients() -> None:
    """At most 512 MiB of logits where materialised ones would take 2.3 GiB, three times."""
    num_tokens, hidden_size, vocab_size = 4096, 256, 151936
    case = HEADS["draw"](num_tokens, hidden_size, vocab_size, torch.float32, device="cuda")
    hidden, head = case.hidden.requires_grad_(), case.head.requires_grad_()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_logprob(hidden, head, case.token_ids).logp.sum().backward()
    gradients = 4 * hidden_size * (num_tokens + vocab_size)
    assert torch.cuda.max_memory_allocated() - before <= 1.1 * (2**29 + gradients)
