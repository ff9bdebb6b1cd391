"""Megatron's DDP and optimizer around a policy."""

import math
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_rl.distributed.groups import ParallelGroups
from megatron_rl.model.policy import PolicyModel
from megatron_rl.trainer.config import OptimizerConfig


class PolicyOptimizer:
    """A model in Megatron's DistributedDataParallel with its AdamW; one step() per global batch.

    Gradients are summed, not averaged, over data-parallel ranks: the loss already carries the global denominator.
    """

    def __init__(self, model: PolicyModel, groups: ParallelGroups, config: OptimizerConfig) -> None:
        transformer_config = model.config
        if not transformer_config.calculate_per_token_loss:
            raise ValueError("the model must be built with calculate_per_token_loss=True, so that gradients are summed")
        ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, check_for_nan_in_grad=True)
        self.pg: ProcessGroupCollection = groups.pg
        self.config = config
        self.ddp = DistributedDataParallel(transformer_config, ddp_config, model, pg_collection=groups.pg)
        bf16 = transformer_config.params_dtype == torch.bfloat16
        self.optimizer: MegatronOptimizer = get_megatron_optimizer(
            MegatronOptimizerConfig(
                optimizer="adam",
                lr=config.lr,
                weight_decay=config.weight_decay,
                adam_beta1=config.beta1,
                adam_beta2=config.beta2,
                adam_eps=config.eps,
                clip_grad=config.clip_grad,
                bf16=bf16,
                params_dtype=transformer_config.params_dtype,
            ),
            [self.ddp],
            use_gloo_process_groups=False,
            pg_collection=groups.pg,
        )

    def zero_grad(self) -> None:
        """Clears the gradient buffers before the first microbatch."""
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()

    def step(self, lr: float) -> float:
        """Reduces gradients over ranks, clips, updates; returns the gradient norm before clipping."""
        finalize_model_grads([self.ddp], num_tokens=None, pg_collection=self.pg)
        self._set_hyperparameters(lr)
        outcome: Any = self.optimizer.step()
        applied, grad_norm, _ = outcome
        if not applied or grad_norm is None or not math.isfinite(grad_norm):
            raise FloatingPointError(
                f"gradients must be finite, got norm {grad_norm}; look for NaN in the loss metrics of this step, "
                "then restart: the run resumes from its last checkpoint"
            )
        return float(grad_norm)

    def _set_hyperparameters(self, lr: float) -> None:
        """Before each step, since loading a checkpoint brings back those it was saved with.

        wd_mult is 0 for biases and norm gains; only Megatron's own scheduler, which is not used here, applies it.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_mult", 1.0)
            group["weight_decay"] = self.config.weight_decay * group.get("wd_mult", 1.0)
            group["betas"] = (self.config.beta1, self.config.beta2)
            group["eps"] = self.config.eps
