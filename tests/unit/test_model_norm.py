"""RMSNorm against float64, in float32 and bfloat16, values and gradients."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from megatron_rl.model.norm import RMSNorm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7, 1, 64), (5, 1, 4, 32)])
def test_values_and_gradients_are_as_good_as_torchs_own(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, upstream, weight = torch.randn(shape), torch.randn(shape), torch.rand(shape[-1]) + 0.5
    norm = RMSNorm(SimpleNamespace(params_dtype=dtype, sequence_parallel=False), shape[-1], eps=1e-3)  # type: ignore
    with torch.no_grad():
        norm.weight.copy_(weight)

    def run(function: Callable[..., torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
        inputs = [x.to(torch.bfloat16).to(dtype).requires_grad_(), norm.weight.detach().to(dtype).requires_grad_()]
        out = function(*inputs)
        return [out.detach(), *torch.autograd.grad((out * upstream.to(dtype)).sum(), inputs)]

    def torch_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, weight.shape, weight, 1e-3)

    def own(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(norm, {"weight": weight}, (x,))

    for got, honest, exact in zip(run(own, dtype), run(torch_norm, dtype), run(torch_norm, torch.float64), strict=True):
        assert got.dtype == dtype
        assert (got - exact).abs().max() <= 2 * (honest - exact).abs().max()
