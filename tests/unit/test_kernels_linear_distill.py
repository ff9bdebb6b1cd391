"""The distillation head against float64 autograd, with the error budget of an honest low-precision head."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_rl_kernels import linear_distill
from torch import Tensor

HEADS = runpy.run_path(str(Path(__file__).parents[1] / "heads.py"))
draw, run, pooled, in_chunks, textbook = (
    HEADS[name] for name in ("draw", "run", "pooled", "in_chunks", "textbook_distill")
)

SIZES = [(1, 4, 2), (5, 3, 7), (63, 17, 101), (130, 24, 33), (64, 16, 512)]
"""(T, H, V): one token, one more than a chunk, odd everything."""


def ours(chunk: int | None) -> Any:
    def head_fn(hidden: Tensor, head: Tensor, case: Any, temperature: float) -> dict[str, Tensor]:
        return {"kl": linear_distill(hidden, case.teacher, head, temperature=temperature, chunk=chunk)}

    return head_fn


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.7, 3.0])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_values_and_gradients_stay_in_the_error_budget(
    size: tuple[int, int, int], temperature: float, dtype: torch.dtype
) -> None:
    """At most twice the honest head's largest error, both taken over a hundred tokens or more."""
    cases = [draw(*size, dtype, seed) for seed in range(-(-100 // size[0]))]

    def all_draws(head_fn: Any, precision: torch.dtype) -> dict[str, Tensor]:
        return pooled([run(head_fn, case, temperature, ["kl"], precision) for case in cases])

    exact = all_draws(textbook, torch.float64)
    for chunk in (62, None):
        honest = all_draws(in_chunks(textbook, chunk or size[0]), dtype)
        allowed = HEADS["budgets"](exact, honest, dtype)
        assert not HEADS["over_budget"](exact, all_draws(ours(chunk), dtype), allowed), chunk


def identity_head(logits: list[float], teacher: list[float], **options: Any) -> tuple[Tensor, Tensor]:
    """(KL, gradient on the logits) of one token, whose states are its logits."""
    student = torch.tensor([logits], requires_grad=True)
    kl = linear_distill(student, torch.tensor([teacher]), torch.eye(len(logits)), **options)
    (gradient,) = torch.autograd.grad(kl.sum(), student)
    return kl.detach()[0], gradient[0]


def test_a_known_pair_of_distributions() -> None:
    """p=(.6,.3,.1), q=(.1,.8,.1): KL .605487, gradient p - q."""
    p, q = torch.tensor([0.6, 0.3, 0.1]), torch.tensor([0.1, 0.8, 0.1])
    kl, gradient = identity_head(p.log().tolist(), q.log().tolist())
    assert kl.item() == pytest.approx(0.605487, abs=1e-6)
    torch.testing.assert_close(gradient, p - q)


def test_a_student_that_equals_its_teacher_has_no_loss_and_no_gradient() -> None:
    case = draw(40, 16, 300, torch.float32)
    hidden = case.hidden.clone().requires_grad_()
    kl = linear_distill(hidden, case.hidden, case.head, chunk=16)
    kl.sum().backward()
    assert hidden.grad is not None
    assert kl.max() <= 1e-6 and hidden.grad.abs().max() <= 1e-6


def test_kl_is_never_below_zero() -> None:
    case = draw(2000, 16, 5, torch.float32)
    near = case.hidden + 1e-4 * (case.teacher - case.hidden)
    assert (linear_distill(case.hidden, near, case.head) >= 0).all()


def test_extreme_logits_stay_finite() -> None:
    """A token that only the teacher holds possible costs its distance in logits; one that nobody does costs nothing."""
    kl, gradient = identity_head([1e4, -1e4, 0.0], [0.0, 0.0, -1e4])
    assert kl.item() == pytest.approx(1e4 - torch.tensor(2.0).log().item()) and gradient.isfinite().all()
    torch.testing.assert_close(gradient, torch.tensor([0.5, -0.5, 0.0]))
    assert identity_head([-3e4, -3e4], [5e4, 5e4])[0] == 0


def test_a_common_offset_of_the_logits_costs_no_digits() -> None:
    """Whole logits near 4096 are exact, so their KL can be."""
    student, teacher = torch.randint(-12, 13, (2, 60, 30), generator=torch.Generator().manual_seed(0)).float()
    eye = torch.eye(30)
    case = HEADS["Case"](student, teacher, eye, torch.zeros(0), {})
    want = textbook(student.double(), eye.double(), case, 1.0)["kl"]
    honest = textbook(student, eye, case, 1.0)["kl"]
    got = linear_distill(student + 4096, teacher - 4096, eye)
    assert (got - want).abs().max() <= 2 * (honest - want).abs().max()


def test_the_teacher_gets_no_gradient_and_the_head_only_the_student_s() -> None:
    case = draw(9, 4, 6, torch.float32)
    hidden, teacher, head = (leaf.clone().requires_grad_() for leaf in (case.hidden, case.teacher, case.head))
    linear_distill(hidden, teacher, head).sum().backward()
    assert teacher.grad is None
    frozen = case.head.clone()
    again = case.head.clone().requires_grad_()
    linear_distill(case.hidden, case.teacher, again, teacher_head_VH=frozen).sum().backward()
    assert head.grad is not None and again.grad is not None and torch.equal(head.grad, again.grad)


def test_a_teacher_may_have_another_head_and_hidden_size() -> None:
    case, other = draw(30, 8, 20, torch.float32), draw(30, 5, 20, torch.float32, seed=1)
    teacher_logits = (other.hidden.double() @ other.head.double().t()).float()
    want = linear_distill(case.hidden @ case.head.t(), teacher_logits, torch.eye(20))
    got = linear_distill(case.hidden, other.hidden, case.head, teacher_head_VH=other.head)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*deterministic")
def test_nothing_uninitialised_reaches_a_result() -> None:
    """With every new tensor full of NaN first, results and gradients are bitwise those of before."""
    case = draw(50, 8, 20, torch.float32)
    clean = run(ours(16), case, 0.8, ["kl"])
    torch.use_deterministic_algorithms(True)  # fills new tensors
    try:
        assert torch.empty(3).isnan().all()
        poisoned = run(ours(16), case, 0.8, ["kl"])
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(values, poisoned[name]) for name, values in clean.items())


def test_a_graph_walked_twice_gives_the_same_gradient_twice() -> None:
    """Though the first walk overwrites the logits that the forward left."""
    case = draw(20, 8, 30, torch.float32)
    hidden = case.hidden.clone().requires_grad_()
    kl = linear_distill(hidden, case.teacher, case.head, chunk=8)
    first, second = (torch.autograd.grad(kl.sum(), hidden, retain_graph=True)[0] for _ in range(2))
    torch.testing.assert_close(first, second, rtol=0, atol=1e-6)


def test_an_empty_batch_has_empty_results_and_zero_gradients() -> None:
    hidden, head = torch.zeros(0, 4, requires_grad=True), torch.ones(5, 4, requires_grad=True)
    kl = linear_distill(hidden, torch.zeros(0, 4), head)
    assert kl.shape == (0,)
    kl.sum().backward()
    assert hidden.grad is not None and hidden.grad.shape == (0, 4)
    assert head.grad is not None and not head.grad.any()


def test_no_tensor_of_the_forward_or_backward_has_all_logits() -> None:
    """The largest tensor any operator makes is a chunk of logits, the head, or the hidden states."""
    num_tokens, hidden_size, vocab_size, chunk = 400, 8, 300, 16
    case = draw(num_tokens, hidden_size, vocab_size, torch.float32)
    hidden, head = case.hidden.requires_grad_(), case.head.requires_grad_()
    with HEADS["LargestTensor"]() as seen:
        linear_distill(hidden, case.teacher, head, chunk=chunk).sum().backward()
    assert 0 < seen.largest <= max(chunk * vocab_size, num_tokens * hidden_size, vocab_size * hidden_size)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"student_TH": torch.zeros(3, 5)}, "student must be .* one H"),
        ({"teacher_TH": torch.zeros(3, 5)}, "teacher must be .* one H"),
        ({"student_TH": torch.zeros(3)}, r"\[T, H\]"),
        ({"head_VH": torch.zeros(0, 4)}, "V at least 1"),
        ({"teacher_TH": torch.zeros(2, 4)}, "the same tokens .* got 3 and 2 tokens, 6 and 6 rows"),
        ({"teacher_head_VH": torch.zeros(7, 4)}, "got 3 and 3 tokens, 6 and 7 rows"),
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
        "student_TH": torch.zeros(3, 4),
        "teacher_TH": torch.zeros(3, 4),
        "head_VH": torch.zeros(6, 4),
    }
    linear_distill(**fitting)
    with pytest.raises(ValueError, match=says):
        linear_distill(**(fitting | change))
