"""Nothing that is not finite reaches the weights, and what made it is named: step, rank, samples or parameters.

Invariant: a step is applied on every rank or on none. A rank that meets a broken loss or gradient goes on to the point
before gradients are reduced, where all ranks tell each other; then each of them raises the same RunError.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron_rl_kernels import LogprobOut
from torch import Tensor

from megatron_rl.config import RunError
from megatron_rl.distributed.groups import ParallelGroups
from megatron_rl.loss.reduce import BrokenValuesError
from megatron_rl.model.forward import unwrapped
from megatron_rl.model.hf_weights import held_gradients
from megatron_rl.records import PackedBatch

LossFunction = Callable[[LogprobOut, PackedBatch], tuple[Tensor, dict[str, Any]]]
"""(log-probs and entropies [T], microbatch) -> (scalar already divided by the global denominator, metrics).

Called on the ranks of the last pipeline stage, tensor- and context-parallel ranks with the same values.
"""

MAX_SKIPPED_IN_A_ROW = 10
"""A spike of the gradient norm passes within a few batches; a run that skips more has stopped learning."""
_NAMED = 3
"""Samples, parameters and problems that a message spells out; it counts the rest."""


class StepGuard:
    """Watches the losses and gradients of one step at a time. Collective: every rank of the world makes every call."""

    def __init__(self, ddp: DistributedDataParallel, groups: ParallelGroups, *, skip_above_norm: float | None) -> None:
        """ddp, around a PolicyModel, reduces no gradient before its finish_grad_sync (overlap_grad_reduce False)."""
        assert not ddp.ddp_config.overlap_grad_reduce, "gradients are looked at before ranks exchange them"
        self._ddp, self._model, self._groups = ddp, unwrapped(ddp), groups
        self._skip_above_norm = skip_above_norm
        self._skipped_in_a_row = 0
        self.begin()

    def begin(self) -> None:
        """Before a step's first microbatch; starts the clock of agree()."""
        self._losses: list[tuple[Tensor, str]] = []
        self._problems: list[str] = []
        self._num_microbatches = 0
        self._started = time.monotonic()

    def watch(self, loss_function: LossFunction) -> LossFunction:
        """loss_function, except that broken values give a loss of slope 0 and no metrics instead of an error.

        So this rank goes on meeting the others in the collectives of its backward until agree() tells them.
        """

        def watched(out: LogprobOut, batch: PackedBatch) -> tuple[Tensor, dict[str, Any]]:
            place = f"microbatch {self._num_microbatches} ({_some('sample', batch.sample_ids)})"
            self._num_microbatches += 1
            try:
                loss, metrics = loss_function(out, batch)
            except BrokenValuesError as error:
                self._problems.append(f"rank {self._groups.rank}, {place}: {error}")
                return out.logp.sum() * 0.0, {}
            self._losses.append((loss.detach(), place))
            return loss, metrics

        return watched

    @torch.no_grad()
    def agree(self, step: int) -> list[float]:
        """Seconds of forward and backward of every global rank. Called between backward and gradient reduction.

        RunError on every rank if a loss, or a gradient that a rank is about to bring into the reduction, is not finite.
        step is 0-based.
        """
        self._problems += self._broken_losses()
        # A finite sum proves finite values, in one pass. Any other may have overflowed, so then the values are counted.
        sums = torch.stack([grad.sum() for grad in self._gradient_buffers()])
        if not self._problems and not bool(sums.isfinite().all()):
            self._problems += self._broken_gradients()
        mine = [time.monotonic() - self._started, float(len(self._problems))]
        everybody = sums.new_empty(self._groups.world_size, 2, dtype=torch.float64)
        dist.all_gather_into_tensor(everybody.view(-1), torch.tensor(mine, dtype=torch.float64, device=sums.device))
        if bool(everybody[:, 1].any()):
            self._refuse(step, "losses and gradients must be finite, got")
        return everybody[:, 0].tolist()

    def admit(self, step: int, grad_norm: float) -> bool:
        """Whether the step may be applied; False if it is to be skipped. Called after the reduction.

        grad_norm is that of the summed gradients before clipping, equal on every rank. RunError on every rank if it is
        not finite, or after too many skipped steps in a row.
        """
        if not math.isfinite(grad_norm):
            self._problems = self._broken_gradients()
            self._refuse(step, f"the gradient norm must be finite, got {grad_norm}; after the sum over ranks")
        if self._skip_above_norm is None or grad_norm <= self._skip_above_norm:
            self._skipped_in_a_row = 0
            return True
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise RunError(
                f"step {step + 1}: fewer than {MAX_SKIPPED_IN_A_ROW} steps in a row may be skipped for a norm above "
                f"trainer.optimizer.skip_above_norm={self._skip_above_norm}, got one more with {grad_norm:.4g}; "
                "raise that bound or lower trainer.optimizer.lr and restart: the run resumes from its last checkpoint"
            )
        return False

    def _gradient_buffers(self) -> Iterator[Tensor]:
        buffers: list[Any] = [*self._ddp.buffers, *self._ddp.expert_parallel_buffers]  # type: ignore[misc]
        yield from (buffer.grad_data for buffer in buffers)

    def _broken_losses(self) -> list[str]:
        if not self._losses:
            return []
        values = torch.stack([loss.double() for loss, _ in self._losses]).tolist()
        return [
            f"rank {self._groups.rank}, {place}: loss {value}"
            for value, (_, place) in zip(values, self._losses, strict=True)
            if not math.isfinite(value)
        ]

    def _broken_gradients(self) -> list[str]:
        """One line about this rank's gradient buffers by Hugging Face name; nothing if every value is finite."""
        broken = []
        for name, grad in held_gradients(self._model, self._groups):
            num_broken = int((~grad.isfinite()).sum())
            if num_broken:
                broken.append(f"{name} ({num_broken} of {grad.numel()} values)")
        return [f"rank {self._groups.rank}: gradient of {_some('parameter', broken)}"] if broken else []

    def _refuse(self, step: int, rule: str) -> NoReturn:
        gathered: list[Any] = [None] * self._groups.world_size
        dist.all_gather_object(gathered, self._problems)
        problems = [problem for of_rank in gathered for problem in of_rank]
        what = _listed(problems, "; ") or "every value is, but their squares overflow"
        raise RunError(
            f"step {step + 1}: {rule} {what}. No weight was changed; restart, and the run resumes from its last "
            "checkpoint. If the step fails again, take its samples out of the data, or lower trainer.optimizer.lr"
        )


def _listed(items: Sequence[str], separator: str) -> str:
    more = len(items) - _NAMED
    return separator.join(items[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def _some(noun: str, items: Sequence[str]) -> str:
    return f"{noun}{'' if len(items) == 1 else 's'} {_listed(items, ', ')}"
