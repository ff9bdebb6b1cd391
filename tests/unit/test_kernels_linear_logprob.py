"""The log-prob head against float64 autograd, with the error budget of an honest low-precision head."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_rl_kernels import linear_logprob
from torch import Tensor

HEADS = runpy.run_path(str(Path(__file__).parents[1] / "heads.py"))
draw, run, pooled, in_chunks, textbook = (
    HEADS[name] for name in ("draw", "run", "pooled", "in_chunks", "textbook_logprob")
)

SIZES = [(1, 4, 2), (5, 3, 7), (63, 17, 101), (130, 24, 33), (64, 16, 512)]
"""(T, H, V): one token, one more than a chunk, odd everything."""


def ours(chunk: int | None, **options: Any) -> Any:
    def head_fn(hidden: Tensor, head: Tensor, case: Any, temperature: float) -> dict[str, Tensor]:
        out = linear_logprob(hidden, head, case.token_ids, temperature=temperature, chunk=chunk, **options)
        return {"logp": out.logp, "entropy": out.entropy}

    return head_fn


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("temperature", "sends"), [(1.0, ["logp"]), (0.7, ["logp", "entropy"]), (3.0, ["entropy"])], ids=str
)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_values_and_gradients_stay_in_the_error_budget(
    size: tuple[int, int, int], temperature: float, sends: list[str], dtype: torch.dtype
) -> None:
    """At most twice the honest head's largest error, both taken over a hundred tokens or more."""
    cases = [draw(*size, dtype, seed) for seed in range(-(-100 // size[0]))]

    def all_draws(head_fn: Any, precision: torch.dtype) -> dict[str, Tensor]:
        return pooled([run(head_fn, case, temperature, sends, precision) for case in cases])

    exact = all_draws(textbook, torch.float64)
    for chunk in (62, None):
        honest = all_draws(in_chunks(textbook, chunk or size[0]), dtype)
        allowed = HEADS["budgets"](exact, honest, dtype)
        assert not HEADS["over_budget"](exact, all_draws(ours(chunk), dtype), allowed), chunk


def test_results_do_not_depend_on_the_chunk() -> None:
    case = draw(50, 8, 20, torch.float32)
    whole = run(ours(50), case, 1.0, ["logp", "entropy"])
    for chunk in (1, 7, 49, 1000):
        other = run(ours(chunk), case, 1.0, ["logp", "entropy"])
        for name, values in whole.items():
            torch.testing.assert_close(values, other[name], rtol=0, atol=3e-6)


@pytest.mark.filterwarnings("ignore:.*deterministic")
def test_nothing_uninitialised_reaches_a_result() -> None:
    """With every new tensor full of NaN first, results and gradients are bitwise those of before."""
    case = draw(50, 8, 20, torch.float32)
    clean = run(ours(16), case, 0.8, ["logp", "entropy"])
    torch.use_deterministic_algorithms(True)  # fills new tensors
    try:
        assert torch.empty(3).isnan().all()
        poisoned = run(ours(16), case, 0.8, ["logp", "entropy"])
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(values, poisoned[name]) for name, values in clean.items())


def test_a_graph_walked_twice_gives_the_same_gradient_twice() -> None:
    """Though the first walk overwrites the logits that the forward left."""
    case = draw(20, 8, 30, torch.float32)
    hidden = case.hidden.clone().requires_grad_()
    out = linear_logprob(hidden, case.head, case.token_ids, chunk=8)
    first, second = (torch.autograd.grad(out.logp.sum(), hidden, retain_graph=True)[0] for _ in range(2))
    torch.testing.assert_close(first, second, rtol=0, atol=1e-6)


def test_a_common_offset_of_the_logits_costs_no_digits() -> None:
    """Whole logits near 4096 are exact, so log-probs and entropies can be, those of nearly sure tokens too."""
    logits = torch.randint(-12, 13, (60, 30), generator=torch.Generator().manual_seed(0)).float()
    token_ids = logits.argmax(dim=1)
    case = HEADS["Case"](logits, logits, torch.eye(30), token_ids, {})
    exact = textbook(logits.double(), torch.eye(30).double(), case, 1.0)
    honest = textbook(logits, torch.eye(30), case, 1.0)
    got = linear_logprob(logits + 4096, torch.eye(30), token_ids)._asdict()
    for name, want in exact.items():
        assert (got[name] - want).abs().max() <= 2 * (honest[name] - want).abs().max()


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
    case = draw(4000, 16, 3, torch.float32)
    assert (linear_logprob(case.hidden * 20, case.head, case.token_ids).logp <= 0).all()


def test_an_empty_batch_has_empty_results_and_zero_gradients() -> None:
    hidden, head = torch.zeros(0, 4, requires_grad=True), torch.ones(5, 4, requires_grad=True)
    out = linear_logprob(hidden, head, torch.zeros(0, dtype=torch.int64))
    assert out.logp.shape == out.entropy.shape == (0,)
    (out.logp.sum() + out.entropy.sum()).backward()
    assert hidden.grad is not None and hidden.grad.shape == (0, 4)
    assert head.grad is not None and not head.grad.any()


@pytest.mark.parametrize("frozen", ["hidden", "head"])
def test_a_frozen_input_gets_no_gradient_and_changes_none(frozen: str) -> None:
    case = draw(9, 4, 6, torch.float32)
    hidden, head, token_ids = case.hidden, case.head, case.token_ids
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
    case = draw(num_tokens, hidden_size, vocab_size, torch.float32)
    hidden, head = case.hidden.requires_grad_(), case.head.requires_grad_()
    with HEADS["LargestTensor"]() as seen:
        out = linear_logprob(hidden, head, case.token_ids, chunk=chunk)
        (out.logp + out.entropy).sum().backward()
    assert 0 < seen.largest <= max(chunk * vocab_size, num_tokens * hidden_size, vocab_size * hidden_size)


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
        ({"impl": "fastest"}, "impl must be auto, reference or kernel"),
        ({"impl": "kernel"}, "impl='kernel' needs"),
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
    case = draw(6, 4, 5, torch.float32)
    narrow, wide = (linear_logprob(case.hidden, case.head, ids) for ids in (case.token_ids.int(), case.token_ids))
    assert torch.equal(narrow.logp, wide.logp)
