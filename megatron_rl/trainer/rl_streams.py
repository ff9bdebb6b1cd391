"""A scored microbatch as the tensors its loss reads."""

from typing import overload

import numpy as np
import torch
from megatron_rl_kernels import LogprobOut
from torch import Tensor

from megatron_rl.loss.head import RlStreams
from megatron_rl.records import PackedBatch


def rl_streams(out: LogprobOut, packed: PackedBatch, device: torch.device) -> RlStreams:
    """Streams of the loss on device; policy_logp and entropy keep the graph they come with."""
    assert packed.advantages is not None and packed.engine_logp is not None, "an RL batch carries RL streams"
    return RlStreams(
        policy_logp=out.logp,
        engine_logp=_on(packed.engine_logp, device),
        advantages=_on(packed.advantages, device),
        loss_mask=_on(packed.loss_mask, device),
        sequence_ids=_on(_document_numbers(packed), device),
        loss_weight=_on(packed.loss_weight, device),
        entropy=out.entropy,
        reference_logp=_on(packed.reference_logp, device),
        proximal_logp=_on(packed.proximal_logp, device),
    )


def _document_numbers(packed: PackedBatch) -> np.ndarray:
    """int64 [T]; padding is a document of its own."""
    lengths = np.diff(packed.cu_seqlens)
    return np.repeat(np.arange(len(lengths)), lengths)


@overload
def _on(stream: np.ndarray, device: torch.device) -> Tensor: ...
@overload
def _on(stream: np.ndarray | None, device: torch.device) -> Tensor | None: ...
def _on(stream: np.ndarray | None, device: torch.device) -> Tensor | None:
    return None if stream is None else torch.tensor(stream, device=device)
