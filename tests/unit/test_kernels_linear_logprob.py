"""The head against float64 autograd, with the error budget of an honest low-precision head."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron_rl_kernels import linear_logprob
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

SIZES = [(1, 4, 2), (5, 3, 7), (63, 17, 101), (130, 24, 33), (64, 16, 512)]
"""(T, H, V): one token, one more than a chunk, odd everything."""

Head = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]


def textbook(hidden: Tensor, head: Tensor, token_ids: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """All logits, in float32 at least, as engine and trainer keep them; gradients end in the inputs' precision."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    logp = (hidden.to(wide) @ head.to(wide).t() / temperature).log_softmax(-1)
    return logp.gather(1, token_ids[:, None]).squeeze(1), -(logp.exp() * logp).sum(-1)


def textbook_in_chunks(chunk: int) -> Head:
    """The textbook on chunk tokens at a time: a matmul library's rounding depends on the number of rows."""

    def head_fn(hidden: Tensor, head: Tensor, token_ids: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        rows = zip(hidden.split(chunk), token_ids.split(chunk), strict=True)
        parts = [textbook(part, head, ids, temperature) for part, ids in rows]
        logp, entropy = zip(*parts, strict=True)
        return torch.cat(logp), torch.cat(entropy)

    return head_fn


def kernel(chunk: int | None) -> Head:
    return lambda hidden, head, token_ids, temperature: linear_logprob(
        hidden, head, token_ids, temperature=temperature, chunk=chunk
    )


def inputs(num_tokens: int, hidden_size: int, vocab_size: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_tokens, hidden_size, generator=generator).to(dtype)
    head = (torch.randn(vocab_size, hidden_size, generator=generator) * 2 / hidden_size**0.5).to(dtype)
    token_ids = torch.randint(vocab_size, (num_tokens,), generator=generator)
    return hidden, head, token_ids, *torch.randn(2, num_tokens, generator=generator)


def run(head_fn: Head, given: tuple[Tensor, ...], dtype: torch.dtype, temperature: float, sends: str) -> list[Tensor]:
    """[logp, entropy, hidden gradient, head gradient] in float64; sends: which results the loss uses."""
    hidden, head, token_ids, grad_logp, grad_entropy = given
    hidden, head = (leaf.to(dtype, copy=True).requires_grad_() for leaf in (hidden, head))
    logp, entropy = head_fn(hidden, head, token_ids, temperature)
    loss = torch.zeros((), dtype=logp.dtype)
    if "logp" in sends:
        loss = loss + logp @ grad_logp.to(logp.dtype)
    if "entropy" in sends:
        loss = loss + entropy @ grad_entropy.to(entropy.dtype)
    loss.backward()
    return [out.detach().double() for out in (logp, entropy, hidden.grad, head.grad) if out is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("temperature", "sends"), [(1.0, "logp"), (0.7, "logp+entropy"), (3.0, "entropy")])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_values_and_gradients_stay_in_the_error_budget(
    size: tuple[int, int, int], temperature: float, sends: str, dtype: torch.dtype
) -> None:
    """At most twice the honest head's largest error, both taken over four draws."""
    draws = [inputs(*size, dtype, seed) for seed in range(4)]

    def pooled(head_fn: Head, precision: torch.dtype) -> list[Tensor]:
        outs = [run(head_fn, given, precision, temperature, sends) for given in draws]
        return [torch.cat([one.flatten() for one in column]) for column in zip(*outs, strict=True)]

    exact = pooled(textbook, torch.float64)
    for chunk in (62, None):
        honest, got = pooled(textbook_in_chunks(chunk or size[0]), dtype), pooled(kernel(chunk), dtype)
        for name, want, low, have in zip(("logp", "entropy", "hidden", "head"), exact, honest, got, strict=True):
            # One rounding of the largest entry, for small sizes whose honest error is zero by luck.
            rounding = torch.finfo(dtype if name in ("hidden", "head") else torch.float32).eps * want.abs().max()
            budget = 2 * (low - want).abs().max() + rounding
            assert (have - want).abs().max() <= budget, (name, chunk)


def test_results_do_not_depend_on_the_chunk() -> None:
    given = inputs(50, 8, 20, torch.float32)
    whole = run(kernel(50), given, torch.float32, 1.0, "logp+entropy")
    for chunk in (1, 7, 49, 1000):
        for one, other in zip(whole, run(kernel(chunk), given, torch.float32, 1.0, "logp+entropy"), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=3e-6)


def test_a_common_offset_of_the_logits_costs_no_digits() -> None:
    """Whole logits near 4096 are exact, so log-probs and entropies can be, those of nearly sure tokens too."""
    logits = torch.randint(-12, 13, (60, 30), generator=torch.Generator().manual_seed(0)).float()
    token_ids = logits.argmax(dim=1)
    want = textbook(logits.double(), torch.eye(30).double(), token_ids, 1.0)
    honest = textbook(logits, torch.eye(30), token_ids, 1.0)
    got = linear_logprob(logits + 4096, torch.eye(30), token_ids)
    for exact, low, have in zip(want, honest, got, strict=True):
        assert (have - exact).abs().max() <= 2 * (low - exact).abs().max()


def test_the_token_gradient_is_one_hot_minus_p() -> None:
    """With an identity head the hidden gradient is the logit gradient, whose form SPEC 1 gives."""
    logits = torch.tensor([[0.3, 0.5, 0.2]]).log().requires_grad_()
    out = linear_logprob(logits, torch.eye(3), torch.tensor([0]))
    (by_logp,) = torch.autograd.grad(out.logp.sum(), logits, retain_graph=True)
    (by_entropy,) = torch.autograd.grad(out.entropy.sum(), logits)
    p = torch.tensor([0.3, 0.5, 0.2])
    torch.testing.assert_close(by_logp[0], torch.tensor([0.7, -0.5, -0.2]))
    torch.testing.assert_close(by_entropy[0], -p * (p.log() + out.entropy.detach()))


def test_extreme_logits_stay_finite() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0], [-3e4, -3e4, -3e4], [88.0, 0.0, -88.0]], requires_grad=True)
    out = linear_logprob(logits, torch.eye(3), torch.tensor([0, 1, 2]))
    (out.logp + out.entropy).sum().backward()
    assert logits.grad is not None and logits.grad.isfinite().all()
    assert out.logp.isfinite().all() and out.entropy.isfinite().all()
    torch.testing.assert_close(out.logp.detach()[0], torch.tensor(0.0))
    torch.testing.assert_close(out.entropy.detach()[1], torch.tensor(3.0).log())


def test_log_probs_are_never_above_zero() -> None:
    hidden, head, token_ids, *_ = inputs(4000, 16, 3, torch.float32)
    assert (linear_logprob(hidden * 20, head, token_ids).logp <= 0).all()


def test_an_empty_batch_has_empty_results_and_zero_gradients() -> None:
    hidden, head = torch.zeros(0, 4, requires_grad=True), torch.ones(5, 4, requires_grad=True)
    out = linear_logprob(hidden, head, torch.zeros(0, dtype=torch.int64))
    assert out.logp.shape == out.entropy.shape == (0,)
    (out.logp.sum() + out.entropy.sum()).backward()
    assert hidden.grad is not None and hidden.grad.shape == (0, 4)
    assert head.grad is not None and not head.grad.any()


@pytest.mark.parametrize("frozen", ["hidden", "head"])
def test_a_frozen_input_gets_no_gradient_and_changes_none(frozen: str) -> None:
    hidden, head, token_ids, *_ = inputs(9, 4, 6, torch.float32)
    leaves = {"hidden": hidden.clone().requires_grad_(), "head": head.clone().requires_grad_()}
    linear_logprob(leaves["hidden"], leaves["head"], token_ids).logp.sum().backward()
    other = "head" if frozen == "hidden" else "hidden"
    wanted = leaves[other].grad
    again = {frozen: {"hidden": hidden, "head": head}[frozen], other: leaves[other].detach().requires_grad_()}
    linear_logprob(again["hidden"], again["head"], token_ids).logp.sum().backward()
    assert again[frozen].grad is None
    assert wanted is not None and torch.equal(again[other].grad, wanted)  # type: ignore[arg-type]


def test_no_tensor_of_the_forward_or_backward_has_all_logits() -> None:
    """The largest tensor any operator makes is a chunk of logits, the head, or the hidden states."""
    num_tokens, hidden_size, vocab_size, chunk = 400, 8, 300, 16
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple | list) else (out,):
                if isinstance(tensor, Tensor):
                    largest = max(largest, tensor.numel())
            return out

    hidden, head, token_ids, *_ = inputs(num_tokens, hidden_size, vocab_size, torch.float32)
    hidden.requires_grad_()
    head.requires_grad_()
    with Watch():
        out = linear_logprob(hidden, head, token_ids, chunk=chunk)
        (out.logp + out.entropy).sum().backward()
    assert 0 < largest <= max(chunk * vocab_size, num_tokens * hidden_size, vocab_size * hidden_size)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hidden_TH": torch.zeros(3, 5)}, "one H"),
        ({"hidden_TH": torch.zeros(3)}, r"\[T, H\]"),
        ({"head_VH": torch.zeros(0, 4)}, "V at least 1"),
        ({"token_ids": torch.zeros(2, dtype=torch.int64)}, "one per row of hidden"),
        ({"token_ids": torch.zeros(3)}, "int32 or int64"),
        ({"token_ids": torch.tensor([0, 6, 1])}, "exactly one vocabulary shard, got one in 0 at position 1"),
        ({"token_ids": torch.tensor([0, 1, -1])}, "exactly one vocabulary shard, got one in 0 at position 2"),
        ({"vocab_start": 1}, "exactly one vocabulary shard"),
        ({"vocab_start": -1}, "vocab_start must not be negative"),
        ({"temperature": 0.0}, "temperature must be above 0, got 0.0"),
        ({"temperature": float("nan")}, "temperature must be above 0, got nan"),
        ({"chunk": 0}, "chunk must be at least 1"),
        ({"impl": "fastest"}, "impl must be auto or reference"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change: dict[str, Any], says: str) -> None:
    fitting: dict[str, Any] = {
        "hidden_TH": torch.zeros(3, 4),
        "head_VH": torch.zeros(6, 4),
        "token_ids": torch.tensor([0, 5, 2]),
    }
    linear_logprob(**fitting)
    with pytest.raises(ValueError, match=says):
        linear_logprob(**(fitting | change))


def test_int32_token_ids_are_taken() -> None:
    hidden, head, token_ids, *_ = inputs(6, 4, 5, torch.float32)
    assert torch.equal(linear_logprob(hidden, head, token_ids.int()).logp, linear_logprob(hidden, head, token_ids).logp)
