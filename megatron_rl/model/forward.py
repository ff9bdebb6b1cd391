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
from megatron_rl.model.context import ContextShard, context_shard
from megatron_rl.model.packed import context_cells, document_positions, pack_documents
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


def stage_hidden(model: torch.nn.Module, batch: DeviceBatch, groups: ParallelGroups) -> Tensor:
    """This pipeline stage on a batch, [tokens of this rank, 1, H]: what the next stage takes, or the head.

    Stages after the first take what Megatron's schedule has given them with set_input_tensor.
    """
    policy = unwrapped(model)
    shard = _shard(batch, groups)
    if shard is None:
        input_ids, positions = batch.input_ids, document_positions(batch.lengths)
    else:
        mine = shard.of_rank[groups.cp_rank]
        input_ids = _padded(batch.input_ids, shard)[mine.to(batch.input_ids.device)]
        positions = document_positions(shard.lengths)[mine]
    return model(
        input_ids.unsqueeze(0),
        position_ids=positions.to(input_ids.device).unsqueeze(0),
        attention_mask=None,
        packed_seq_params=_documents(policy, batch, shard, positions, groups),
    )


def head_logprobs(
    model: torch.nn.Module, hidden: Tensor, batch: DeviceBatch, groups: ParallelGroups, *, temperature: float = 1.0
) -> LogprobOut:
    """(log p of each target, entropy at each position), float32 [T] each, from the last stage's hidden states.

    Equal on tensor- and context-parallel ranks. Probabilities are those of logits / temperature. Differentiable; the
    graph must be walked once per forward.
    """
    head_VH = unwrapped(model).head_weight
    shard = _shard(batch, groups)
    target_ids = batch.target_ids
    if shard is not None:
        target_ids = _padded(target_ids, shard)[shard.of_rank[groups.cp_rank].to(target_ids.device)]
    out = linear_logprob(
        _whole_sequence(hidden, groups, full_grad=False),
        head_VH,
        target_ids,
        vocab_start=groups.tp_rank * head_VH.shape[0],
        group=groups.tp_group if groups.tp_size > 1 else None,
        temperature=temperature,
    )
    if shard is None:
        return out
    return LogprobOut(*(_all_tokens(stream, shard, groups) for stream in (out.logp, out.entropy)))


def taken_logprobs(
    model: torch.nn.Module, batch: DeviceBatch, groups: ParallelGroups, *, temperature: float = 1.0
) -> LogprobOut:
    """head_logprobs of a model that is one pipeline stage; trainer.step runs the others.

    model is a PolicyModel or Megatron's DistributedDataParallel around one.
    """
    assert groups.pp_size == 1, "a model of several pipeline stages runs by Megatron's schedule"
    return head_logprobs(model, stage_hidden(model, batch, groups), batch, groups, temperature=temperature)


@torch.no_grad()
def head_logits(model: torch.nn.Module, hidden: Tensor, batch: DeviceBatch, groups: ParallelGroups) -> Tensor:
    """All logits in float32, [T, V]. For tests and probes: a loss never holds them."""
    hidden_TH = _whole_sequence(hidden, groups, full_grad=True)
    shard_TV = F.linear(hidden_TH.float(), unwrapped(model).head_weight.float())
    if groups.tp_size > 1:
        parts = [torch.empty_like(shard_TV) for _ in range(groups.tp_size)]
        dist.all_gather(parts, shard_TV, group=groups.tp_group)
        shard_TV = torch.cat(parts, dim=1)
    shard = _shard(batch, groups)
    return shard_TV if shard is None else _all_tokens(shard_TV, shard, groups)


def full_logits(model: torch.nn.Module, batch: DeviceBatch, groups: ParallelGroups) -> Tensor:
    """head_logits of a model that is one pipeline stage."""
    with torch.no_grad():
        return head_logits(model, stage_hidden(model, batch, groups), batch, groups)


@torch.no_grad()
def gather_tokens(values: Tensor, batch: DeviceBatch, groups: ParallelGroups) -> Tensor:
    """One value per token of this rank, as layers see them, -> [T] on every tensor- and context-parallel rank."""
    parts = [torch.empty_like(values) for _ in range(groups.tp_size)]
    dist.all_gather(parts, values, group=groups.tp_group)
    shard = _shard(batch, groups)
    return torch.cat(parts) if shard is None else _all_tokens(torch.cat(parts), shard, groups)


def unwrapped(model: torch.nn.Module) -> PolicyModel:
    """The PolicyModel inside Megatron's wrappers."""
    while not isinstance(model, PolicyModel):
        model = model.module  # type: ignore[assignment]
    return model


def _shard(batch: DeviceBatch, groups: ParallelGroups) -> ContextShard | None:
    """The cut of the batch over context-parallel ranks; None where every rank takes it whole."""
    if groups.cp_size > 1:
        return context_shard(batch.lengths, context_size=groups.cp_size, tensor_size=groups.tp_size)
    num_tokens = len(batch.input_ids)
    if num_tokens % groups.tp_size:
        raise ValueError(
            f"a packed batch must be a multiple of parallel.tensor={groups.tp_size} tokens long, got {num_tokens}; "
            "pack with pad_multiple"
        )
    return None


def _padded(ids: Tensor, shard: ContextShard) -> Tensor:
    """[T] -> [P], any id on padding."""
    return ids[shard.source.to(ids.device)]


def _all_tokens(mine: Tensor, shard: ContextShard, groups: ParallelGroups) -> Tensor:
    """[tokens of this context-parallel rank, ...] -> [T, ...] on each. Every rank's loss is the same, so a gradient
    goes back to the rank of its token and is not summed."""
    everyone = gather_from_sequence_parallel_region(mine, tensor_parallel_output_grad=False, group=groups.cp_group)
    return everyone.index_select(0, shard.place_of_token.to(mine.device))


def _whole_sequence(hidden: Tensor, groups: ParallelGroups, *, full_grad: bool) -> Tensor:
    """Sequence-parallel shards -> [T, H]. full_grad False: the consumer's backward sums over the group."""
    if groups.tp_size > 1:
        hidden = gather_from_sequence_parallel_region(
            hidden, tensor_parallel_output_grad=full_grad, group=groups.tp_group
        )
    return hidden.squeeze(1)


def _documents(
    policy: PolicyModel, batch: DeviceBatch, shard: ContextShard | None, positions: Tensor, groups: ParallelGroups
) -> PackedSeqParams:
    lengths = batch.lengths if shard is None else shard.lengths
    if policy.position_embedding_type == "none":
        config = policy.config
        assert config.kv_channels is not None, "every family gives the head dimension"
        documents = pack_documents(
            lengths,
            rotary_dim=int(config.kv_channels * policy.rotary_percent),
            rope_base=policy.rotary_base,
            dtype=config.params_dtype,
            positions=None if shard is None else positions,
        )
        if shard is not None:
            documents.context = context_cells(shard.lengths, shard.of_rank, groups.cp_rank)
        return documents
    borders = torch.tensor([0, *lengths], device=batch.cu_seqlens.device).cumsum(0).int()
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=borders,
        cu_seqlens_kv=borders,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )
