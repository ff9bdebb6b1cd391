"""Rows times their experts' matrices, against float64 expert by expert, for any number of rows each."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rl.model.grouped import GroupedProduct, padded_rows

COUNTS = st.lists(st.one_of(st.just(0), st.integers(0, 70), st.integers(200, 700)), min_size=1, max_size=6)
OUT, INNER = 24, 16


def product_and_gradients(
    product: Callable[[Tensor, Tensor], Tensor], rows: Tensor, weight: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    rows, weight = rows.detach().requires_grad_(), weight.detach().requires_grad_()
    out = product(rows, weight)
    grad_rows, grad_weight = torch.autograd.grad(out, [rows, weight], grad)
    return out.detach(), grad_rows, grad_weight


def by_hand(counts: list[int]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda rows, weight: torch.cat(
        [part @ matrix.T for part, matrix in zip(rows.split(counts), weight, strict=True)]
    )


@given(counts=COUNTS, dtype=st.sampled_from([torch.float32, torch.bfloat16]), seed=st.integers(0, 99))
def test_value_and_gradients_are_within_twice_the_rounding_of_torchs_grouped_product(
    counts: list[int], dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    num_rows = sum(counts)
    rows, weight, grad = (
        torch.randn(*shape, generator=generator).to(dtype)
        for shape in ((num_rows, INNER), (len(counts), OUT, INNER), (num_rows, OUT))
    )
    exact = product_and_gradients(by_hand(counts), rows.double(), weight.double(), grad.double())
    ends = torch.tensor(counts).cumsum(0, dtype=torch.int32)
    honest = product_and_gradients(lambda r, w: F.grouped_mm(r, w.transpose(1, 2), offs=ends), rows, weight, grad)
    got = product_and_gradients(lambda r, w: GroupedProduct.apply(r, w, counts), rows, weight, grad)
    for name, g, h, e in zip(("value", "rows", "weight"), got, honest, exact, strict=True):
        assert g.dtype == dtype
        if e.numel():
            budget = 2 * (h.double() - e).abs().max() + 1e-6
            assert (g.double() - e).abs().max() <= budget, name


@given(counts=COUNTS)
def test_every_output_is_written(counts: list[int]) -> None:
    """Memory that empty() hands out is filled with NaN here, so that what nobody wrote shows."""
    torch.use_deterministic_algorithms(True)
    try:
        ones = torch.ones(sum(counts), INNER, dtype=torch.bfloat16)
        weight = torch.ones(len(counts), OUT, INNER, dtype=torch.bfloat16)
        got = product_and_gradients(
            lambda r, w: GroupedProduct.apply(r, w, counts), ones, weight, torch.ones(sum(counts), OUT).bfloat16()
        )
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(got[0], torch.full_like(got[0], INNER))
    assert torch.equal(got[1], torch.full_like(got[1], OUT))
    assert torch.equal(got[2], torch.tensor(counts).bfloat16()[:, None, None].expand_as(got[2]))


class RowsOfProducts(TorchDispatchMode):
    """Collects over how many rows matrix products run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name == "aten::mm":
            left, right = args[:2]
            self.seen.add(left.shape[1] if left.shape[0] == OUT and right.shape[1] == INNER else left.shape[0])
        return func(*args, **(kwargs or {}))


@given(counts=COUNTS)
def test_every_product_of_bfloat16_has_a_rounded_number_of_rows(counts: list[int]) -> None:
    rows, weight = torch.ones(sum(counts), INNER).bfloat16(), torch.ones(len(counts), OUT, INNER).bfloat16()
    with RowsOfProducts() as products:
        product_and_gradients(
            lambda r, w: GroupedProduct.apply(r, w, counts), rows, weight, torch.ones(sum(counts), OUT).bfloat16()
        )
    assert products.seen <= {padded_rows(count, torch.bfloat16) for count in counts}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matrices_may_have_any_sizes(dtype: torch.dtype) -> None:
    """torch's grouped product wants rows of a multiple of 16 bytes."""
    counts, generator = [20, 0, 17], torch.Generator().manual_seed(0)
    rows, weight = (
        torch.randn(37, 7, generator=generator).to(dtype),
        torch.randn(3, 5, 7, generator=generator).to(dtype),
    )
    want = by_hand(counts)(rows.double(), weight.double())
    assert (GroupedProduct.apply(rows, weight, counts) - want).abs().max() < 8 * torch.finfo(dtype).eps


def test_infinite_rows_of_one_expert_leave_the_outputs_of_the_others_alone() -> None:
    counts = [30, 5, 40]
    rows, weight = torch.ones(75, INNER).bfloat16(), torch.ones(3, OUT, INNER).bfloat16()
    rows[30:35] = torch.inf
    out = GroupedProduct.apply(rows, weight, counts)
    assert torch.isinf(out[30:35]).all()
    assert (out[:30] == INNER).all() and (out[35:] == INNER).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_numbers_of_rows_are_rounded_to_few_sizes_by_at_most_a_sixteenth(dtype: torch.dtype) -> None:
    sizes = {n: padded_rows(n, dtype) for n in range(5000)}
    if dtype == torch.float32:
        assert all(n == padded for n, padded in sizes.items())
        return
    assert all(n <= padded < n + max(16, n / 16 + 1) for n, padded in sizes.items())
    assert len(set(sizes.values())) < 90
