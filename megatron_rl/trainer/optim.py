"""Megatron's DDP and optimizer around a policy."""

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import ChainedOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import optimizer as megatron_optimizer
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_rl.checkpoint.adam import restart_adam
from megatron_rl.distributed.groups import ParallelGroups
from megatron_rl.model.policy import PolicyModel
from megatron_rl.telemetry.values import Last, Value
from megatron_rl.trainer.config import OptimizerConfig
from megatron_rl.trainer.guards import StepGuard
from megatron_rl.trainer.straggler import StragglerWatch, sets_that_meet


@dataclass(frozen=True)
class Update:
    """What became of a step; equal on every rank."""

    grad_norm: float
    """Of the summed gradients over all parameters, before clipping."""
    metrics: dict[str, Value]
    """Seconds per rank (straggler.py); optimizer/skipped if steps may be skipped."""


class PolicyOptimizer:
    """A model in Megatron's DistributedDataParallel with its AdamW; one step() per global batch.

    Each data-parallel rank keeps and updates its own share of master weights and moments (distributed optimizer).
    Gradients are summed, not averaged, over data-parallel ranks: the loss already carries the global denominator.
    """

    def __init__(self, model: PolicyModel, groups: ParallelGroups, config: OptimizerConfig) -> None:
        transformer_config = model.config
        if not transformer_config.calculate_per_token_loss:
            raise ValueError("the model must be built with calculate_per_token_loss=True, so that gradients are summed")
        ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
        self.pg: ProcessGroupCollection = groups.pg
        self.config = config
        self.ddp = DistributedDataParallel(transformer_config, ddp_config, model, pg_collection=groups.pg)
        bf16 = transformer_config.params_dtype == torch.bfloat16
        optimizer: Any = get_megatron_optimizer(
            MegatronOptimizerConfig(
                optimizer="adam",
                lr=config.lr,
                weight_decay=config.weight_decay,
                adam_beta1=config.beta1,
                adam_beta2=config.beta2,
                adam_eps=config.eps,
                clip_grad=config.clip_grad,
                bf16=bf16,
                use_distributed_optimizer=True,
                params_dtype=transformer_config.params_dtype,
            ),
            [self.ddp],
            use_gloo_process_groups=False,
            pg_collection=groups.pg,
        )
        self.optimizer: ChainedOptimizer = optimizer
        self.guard = StepGuard(self.ddp, groups, skip_above_norm=config.skip_above_norm)
        self.straggler = StragglerWatch(sets_that_meet(groups.places), is_writer=groups.rank == 0)

    def zero_grad(self) -> None:
        """Clears the gradient buffers before the first microbatch."""
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.guard.begin()

    def step(self, lr: float, *, step: int) -> Update:
        """Reduces gradients over ranks, clips, updates; step is 0-based.

        RunError on every rank, with weights and moments as they were, where guards.py refuses the step.
        """
        metrics = self.straggler.update(self.guard.agree(step), step=step)
        finalize_model_grads([self.ddp], num_tokens=None, pg_collection=self.pg)
        self._set_hyperparameters(lr)
        self.optimizer.prepare_grads()
        grad_norm = float(self.optimizer.get_grad_norm() or 0.0)
        applied = self.guard.admit(step, grad_norm)
        if applied:
            self._clip(grad_norm)
            self.optimizer.step_with_ready_grads()
        if self.config.skip_above_norm is not None:
            metrics["optimizer/skipped"] = Last(float(not applied))
        return Update(grad_norm, metrics)

    def reset_state(self) -> None:
        """Moments and step count start over, as in a new optimizer; weights, master weights and learning rate stay.

        Every rank resets its own share; nothing is communicated.
        """
        restart_adam(self.optimizer)

    def _clip(self, grad_norm: float) -> None:
        for part in self.optimizer.chained_optimizers:
            parameters: list[Any] = part.get_parameters()
            if parameters:
                megatron_optimizer.clip_grad_by_total_norm_fp32(
                    parameters, max_norm=self.config.clip_grad, total_norm=grad_norm
                )

    def _set_hyperparameters(self, lr: float) -> None:
        """Before each step, since loading a checkpoint brings back those it was saved with.

        wd_mult is 0 for biases and norm gains; only Megatron's own scheduler, which is not used here, applies it.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_mult", 1.0)
            group["weight_decay"] = self.config.weight_decay * group.get("wd_mult", 1.0)
            group["betas"] = (self.config.beta1, self.config.beta2)
            group["eps"] = self.config.eps
