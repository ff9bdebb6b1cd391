"""Frozen weights in pinned host memory: on the GPU for the pass, and only then."""

import torch

from megatron_rl.trainer.frozen import FrozenTensors

MIB = 2**20


def test_offloaded_values_stand_in_on_the_gpu_and_leave_it_again() -> None:
    own = torch.nn.Parameter(torch.arange(4.0 * MIB, device="cuda"))
    expected, place = own.detach().clone(), own.data_ptr()
    before = torch.cuda.memory_allocated()
    frozen = FrozenTensors([own], offload=True)
    assert torch.cuda.memory_allocated() == before
    with frozen.standing_in(fill=True), torch.no_grad():
        own.fill_(7.0)
    for _ in range(2):
        with frozen.standing_in():
            assert own.is_cuda and bool((own == 7.0).all())
            assert torch.cuda.memory_allocated() == before + 16 * MIB
    assert torch.equal(own, expected) and own.data_ptr() == place
    assert torch.cuda.memory_allocated() == before
    frozen.copy_own()
    with torch.no_grad():
        own.zero_()
    with frozen.standing_in():
        assert torch.equal(own, expected)
