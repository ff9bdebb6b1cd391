"""Packed batch to log-probs of its targets."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron_rl_kernels import LogprobOut, linear_logprob
from torch import Tensor

from megatron_rl.distributed.groups import ParallelGroups
from megatron_rl.model.packed import document_positions, pack_documents
from megatron_rl.model.policy import PolicyModel
from megatron_rl.records import PackedBatch


@dataclass(frozen=True)
class DeviceBatch:
    """A packed batch as tensors. T is a multiple of the tensor-parallel size; documents never see each other."""

    input_ids: Tensor
    """int64 [T]"""
    target_ids: Tensor
    """int64 [T]"""
    cu_seqlens: Tensor
    """int32 [D+1]: document borders, first 0, last T."""
    lengths: tuple[int, ...]
    """Tokens of each document, on the host."""

    @property
    def max_seqlen(self) -> int:
        """Tokens of the longest document."""
        return max(self.lengths)

    @classmethod
    def from_packed(cls, packed: PackedBatch, device: torch.device) -> "DeviceBatch":
        """Copies what the forward needs to device."""
        borders = torch.tensor(packed.cu_seqlens, dtype=torch.int32)
        return cls(
            input_ids=torch.tensor(packed.input_ids, dtype=torch.int64, device=device),
            target_ids=torch.tensor(packed.target_ids, dtype=torch.int64, device=device),
            cu_seqlens=borders.to(device),
            lengths=tuple(borders.diff().tolist()),
        )


def taken_logprobs(
    model: torch.nn.Module, batch: DeviceBatch, groups: ParallelGroups, *, temperature: float = 1.0
) -> LogprobOut:
    """(log p of each target, entropy at each position), float32 [T] each, equal on tensor-parallel ranks.

    model is a PolicyModel or Megatron's DistributedDataParallel around one. Probabilities are those of
    logits / temperature. Differentiable; the graph must be walked once per forward.
    """
    hidden_TH = _hidden(model, batch, groups, full_grad=False)
    head_VH = unwrapped(model).head_weight
    return linear_logprob(
        hidden_TH,
        head_VH,
        batch.target_ids,
        vocab_start=groups.tp_rank * head_VH.shape[0],
        group=groups.tp_group if groups.tp_size > 1 else None,
        temperature=temperature,
    )


@torch.no_grad()
def full_logits(model: torch.nn.Module, batch: DeviceBatch, groups: ParallelGroups) -> Tensor:
    """All logits in float32, [T, V], on every rank. For tests and probes: a loss never holds them."""
    hidden_TH = _hidden(model, batch, groups, full_grad=True)
    shard_TV = F.linear(hidden_TH.float(), unwrapped(model).head_weight.float())
    if groups.tp_size == 1:
        return shard_TV
    shards = [torch.empty_like(shard_TV) for _ in range(groups.tp_size)]
    dist.all_gather(shards, shard_TV, group=groups.tp_group)
    return torch.cat(shards, dim=1)


def unwrapped(model: torch.nn.Module) -> PolicyModel:
    """The PolicyModel inside Megatron's wrappers."""
    while not isinstance(model, PolicyModel):
        model = model.module  # type: ignore[assignment]
    return model


def _hidden(model: torch.nn.Module, batch: DeviceBatch, groups: ParallelGroups, *, full_grad: bool) -> Tensor:
    """Final hidden states of all tokens, [T, H]. full_grad False: the consumer's backward sums over the group."""
    policy = unwrapped(model)
    num_tokens = len(batch.input_ids)
    if num_tokens % groups.tp_size:
        raise ValueError(
            f"a packed batch must be a multiple of parallel.tensor={groups.tp_size} tokens long, got {num_tokens}; "
            "pack with pad_multiple"
        )
    hidden = model(
        batch.input_ids.unsqueeze(0),
        position_ids=document_positions(batch.lengths).to(batch.input_ids.device).unsqueeze(0),
        attention_mask=None,
        packed_seq_params=_documents(policy, batch),
    )
    if groups.tp_size > 1:
        hidden = gather_from_sequence_parallel_region(
            hidden, tensor_parallel_output_grad=full_grad, group=groups.tp_group
        )
    return hidden.squeeze(1)


def _documents(policy: PolicyModel, batch: DeviceBatch) -> PackedSeqParams:
    if policy.position_embedding_type == "none":
        config = policy.config
        assert config.kv_channels is not None, "every family gives the head dimension"
        return pack_documents(
            batch.lengths, head_dim=config.kv_channels, rope_base=policy.rotary_base, dtype=config.params_dtype
        )
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=batch.cu_seqlens,
        cu_seqlens_kv=batch.cu_seqlens,
        max_seqlen_q=batch.max_seqlen,
        max_seqlen_kv=batch.max_seqlen,
    )
