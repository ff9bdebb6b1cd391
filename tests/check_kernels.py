"""Both heads' Triton kernels against the textbook: check_kernels.py cuda, or cpu under TRITON_INTERPRET=1.

Prints "in budget: N cases", or stops at the first that is not. check_kernels.py compile needs no GPU and runs nothing:
it compiles every kernel to machine code of a Hopper GPU, and prints "compiled: N kernels".
"""

import runpy
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from megatron_rl_kernels import linear_distill, linear_logprob
from torch import Tensor

HEADS = runpy.run_path(str(Path(__file__).with_name("heads.py")))
SIZES = [(1, 4, 1), (5, 3, 7), (33, 17, 101), (4, 16, 8195)]
"""(T, H, V): one column, odd everything, two chunks, more columns than two blocks of the kernels hold."""
SENDS = [(1.0, ["logp"]), (0.7, ["logp", "entropy"]), (3.0, ["entropy"]), (0.7, ["kl"])]


def by_kernel(hidden: Tensor, head: Tensor, case: Any, temperature: float) -> dict[str, Tensor]:
    options: dict[str, Any] = {"temperature": temperature, "chunk": 32, "impl": "kernel"}
    if case.token_ids is None:
        return {"kl": linear_distill(hidden, case.teacher, head, **options)}
    return linear_logprob(hidden, head, case.token_ids, **options)._asdict()


def by_textbook(hidden: Tensor, head: Tensor, case: Any, temperature: float) -> dict[str, Tensor]:
    textbook = HEADS["textbook_distill" if case.token_ids is None else "textbook_logprob"]
    return textbook(hidden, head, case, temperature)


def far_from_zero(device: str) -> Any:
    """Whole logits near 4096 with a largest that comes late: exact, so that log-probs can be."""
    num_tokens, vocab_size = 6, 8195
    rising = torch.linspace(-12, 12, vocab_size).round()
    head = torch.stack([rising, torch.ones(vocab_size)], dim=1)
    hidden = torch.tensor([[scale, offset] for scale in (1.0, 0.5) for offset in (0.0, 4096.0, -4096.0)])
    token_ids = torch.tensor([0, 1, vocab_size - 1] * 2)
    case = HEADS["draw"](num_tokens, 2, vocab_size, torch.float32)
    leaves = (hidden, hidden.flip(0), head, token_ids)
    sends = {name: by.to(device) for name, by in case.sends.items()}
    return HEADS["Case"](*(leaf.to(device) for leaf in leaves), sends)


def check(cases: list[Any], temperature: float, sends: list[str], num_by_kernel: int) -> None:
    """Of the first cases by the kernel; the honest head's largest error is that of all, so that it is no luck."""
    dtype = cases[0].hidden.dtype
    if sends == ["kl"]:
        cases = [replace(case, token_ids=None) for case in cases]

    def all_of(some: list[Any], head_fn: Any, precision: torch.dtype) -> dict[str, Tensor]:
        return HEADS["pooled"]([HEADS["run"](head_fn, case, temperature, sends, precision) for case in some])

    allowed = HEADS["budgets"](all_of(cases, by_textbook, torch.float64), all_of(cases, by_textbook, dtype), dtype)
    few = cases[:num_by_kernel]
    over = HEADS["over_budget"](all_of(few, by_textbook, torch.float64), all_of(few, by_kernel, dtype), allowed)
    assert not over, (list(cases[0].hidden.shape), list(cases[0].head.shape), dtype, temperature, sends, over)


def main(device: str) -> None:
    grid = [
        [HEADS["draw"](*size, dtype, seed, device) for seed in range(-(-100 // size[0]))]
        for size, dtype in product(SIZES, (torch.float32, torch.bfloat16))
    ]
    for cases, (temperature, sends) in product(grid, SENDS):
        check(cases, temperature, sends, num_by_kernel=2)
    for sends in (["logp"], ["kl"]):
        check([far_from_zero(device)], 1.0, sends, num_by_kernel=1)
    print(f"in budget: {len(grid) * len(SENDS) + 2} cases")


def compile_all() -> None:
    # Triton is installed where CUDA is, and for the tests that run this.
    import triton  # pyright: ignore[reportMissingImports]
    from megatron_rl_kernels.linear_distill import kernel as distill
    from megatron_rl_kernels.linear_logprob import kernel as logprob
    from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports]
    from triton.compiler import ASTSource  # pyright: ignore[reportMissingImports]

    kernels: list[tuple[Any, dict[str, Any]]] = [
        (logprob._stats_kernel, {}),
        (logprob._gradient_kernel, {"WITH_ENTROPY": True}),
        (logprob._gradient_kernel, {"WITH_ENTROPY": False}),
        (distill._stats_kernel, {}),
        (distill._gradient_kernel, {}),
    ]
    for kernel, options in kernels:
        constants = {"BLOCK": 4096, **options}
        types = {name: "i32" if name.startswith("num_") else "*fp32" for name in kernel.arg_names}
        source = ASTSource(fn=kernel, signature=types | dict.fromkeys(constants, "constexpr"), constexprs=constants)
        assert triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8}).asm["cubin"]
    print(f"compiled: {len(kernels)} kernels")


if __name__ == "__main__":
    if sys.argv[1] == "compile":
        compile_all()
    else:
        main(sys.argv[1])
