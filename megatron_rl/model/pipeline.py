"""Microbatches through all pipeline stages, by Megatron's own schedule: 1F1B, or one after the other on one stage."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron_rl_kernels import LogprobOut
from torch import Tensor

from megatron_rl.distributed.groups import ParallelGroups
from megatron_rl.model.forward import DeviceBatch, head_logprobs, stage_hidden, unwrapped

T = TypeVar("T")
Score = Callable[[Tensor, int], tuple[Tensor, Any]]
"""(last stage's hidden states, number of the microbatch) -> (scalar to differentiate, anything to hand back)."""


def run_microbatches(
    model: torch.nn.Module, batches: Sequence[DeviceBatch], score: Score, groups: ParallelGroups, *, train: bool
) -> list[Any]:
    """What score handed back for each microbatch; nothing on ranks of earlier stages. Collective over the pipeline.

    train also runs the backward of every scalar, as it is: nothing is divided by the number of microbatches or tokens.
    model is Megatron's DistributedDataParallel then; its gradients are not yet reduced on return.
    """

    def forward(numbers: Iterator[int], stage: torch.nn.Module) -> tuple[Tensor, Callable[[Tensor], Any]]:
        number = next(numbers)
        return stage_hidden(stage, batches[number], groups), partial(_scored, score=score, number=number)

    config = unwrapped(model).config
    config.no_sync_func = model.no_sync if train else contextlib.nullcontext  # type: ignore[assignment]
    with torch.set_grad_enabled(train):
        return get_forward_backward_func(pp_size=groups.pp_size)(
            forward_step_func=forward,
            data_iterator=iter(range(len(batches))),
            model=model,
            num_microbatches=len(batches),
            seq_length=1,  # the stages tell each other the shapes
            micro_batch_size=1,
            forward_only=not train,
            pg_collection=groups.pg,
            p2p_communicator=P2PCommunicator(groups.pp_group, config),
        )


def score_tokens(
    model: torch.nn.Module, batch: DeviceBatch, groups: ParallelGroups, *, temperature: float = 1.0
) -> LogprobOut:
    """score_all_tokens of one batch."""
    return score_all_tokens(model, [batch], groups, temperature=temperature)[0]


@torch.no_grad()
def score_all_tokens(
    model: torch.nn.Module, batches: Sequence[DeviceBatch], groups: ParallelGroups, *, temperature: float
) -> list[LogprobOut]:
    """(log p of each target, entropy at each position) of each batch, float32 [T] each, on every rank that serves them.

    Without gradients and for any layout. Collective over the pipeline, which is filled and drained once: m batches
    through p stages take the time of m + p - 1 stages, and one broadcast.
    """

    def score(hidden: Tensor, number: int) -> tuple[Tensor, LogprobOut]:
        return hidden.new_zeros(()), head_logprobs(model, hidden, batches[number], groups, temperature=temperature)

    if not batches:
        return []
    outputs = run_microbatches(model, batches, score, groups, train=False)
    if groups.pp_size == 1:
        return outputs
    sizes = [len(batch.input_ids) for batch in batches]
    if outputs:
        streams = torch.cat([torch.stack(output) for output in outputs], dim=1)
    else:
        streams = torch.empty(2, sum(sizes), device=batches[0].input_ids.device)
    dist.broadcast(streams, src=last_stage_rank(groups), group=groups.pp_group)
    return [LogprobOut(*part) for part in streams.split(sizes, dim=1)]


def from_last_stage(value: T, groups: ParallelGroups) -> T:
    """The last stage's value, a small picklable object, on every stage."""
    if groups.pp_size == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, src=last_stage_rank(groups), group=groups.pp_group)
    return values[0]


def last_stage_rank(groups: ParallelGroups) -> int:
    """Global rank of this rank's counterpart in the last stage."""
    return dist.get_process_group_ranks(groups.pp_group)[-1]


def _scored(hidden: Tensor, *, score: Score, number: int) -> tuple[Tensor, Tensor, Any]:
    """Three results, so that Megatron divides the scalar by nothing; the token count is not used."""
    scalar, value = score(hidden, number)
    return scalar, torch.zeros((), dtype=torch.int), value
