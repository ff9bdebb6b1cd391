"""Attention in low precision: as good as torch's kernel of that precision, whichever kernel computes it."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_rl.model.attention import FLOAT32_BELOW, softmax_attention

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16


def value_and_gradients(attend: Callable[..., Tensor], streams: list[Tensor], grad: Tensor) -> list[Tensor]:
    leaves = [stream.detach().requires_grad_() for stream in streams]
    out = attend(*leaves, is_causal=True, scale=0.25)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]


def torchs_own(query: Tensor, key: Tensor, value: Tensor, **options: object) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, enable_gqa=True, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("length", [1, 40, FLOAT32_BELOW - 1, FLOAT32_BELOW])
def test_value_and_gradients_are_within_twice_the_error_of_torchs_kernel(length: int) -> None:
    generator = torch.Generator().manual_seed(length)
    streams = [
        torch.randn(2, heads, length, HEAD_DIM, generator=generator).bfloat16() for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]
    grad = torch.randn(2, HEADS, length, HEAD_DIM, generator=generator).bfloat16()
    exact = value_and_gradients(torchs_own, [stream.double() for stream in streams], grad)
    honest = value_and_gradients(torchs_own, streams, grad)
    got = value_and_gradients(softmax_attention, streams, grad)
    for name, have, low, want in zip(("value", "query", "key", "v"), got, honest, exact, strict=True):
        assert have.dtype == torch.bfloat16
        rounding = torch.finfo(torch.bfloat16).eps * want.abs().max()
        assert (have - want).abs().max() <= 2 * (low - want).abs().max() + rounding, name


@pytest.mark.parametrize(
    ("length", "kernel_dtype"), [(FLOAT32_BELOW - 1, torch.float32), (FLOAT32_BELOW, torch.bfloat16)]
)
def test_short_documents_are_computed_in_float32(
    length: int, kernel_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def spy(query: Tensor, *_args: Tensor, **_options: object) -> Tensor:
        seen.append(query.dtype)
        return query

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    streams = [torch.zeros(1, heads, length, HEAD_DIM).bfloat16() for heads in (HEADS, KV_HEADS, KV_HEADS)]
    assert softmax_attention(*streams).dtype == torch.bfloat16
    assert seen == [kernel_dtype]
