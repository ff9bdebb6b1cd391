"""What a trainer needs to know beyond its model and its data."""

from typing import Literal

from pydantic import Field, model_validator

from megatron_rl.checkpoint.config import CheckpointConfig
from megatron_rl.config import ConfigModel
from megatron_rl.loss.snr import SnrConfig
from megatron_rl.trainer.reference_config import ReferenceConfig


class OptimizerConfig(ConfigModel):
    """AdamW with warm-up and a schedule that ends at the run's last step."""

    lr: float = Field(gt=0, default=1e-5)
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """Shape of the learning rate after the warm-up; all but constant end at final_lr_fraction * lr. wsd stays at lr and
    falls linearly over the last decay_steps."""
    warmup_steps: int = Field(ge=0, default=0)
    """Steps of linear warm-up from lr / warmup_steps."""
    final_lr_fraction: float | None = Field(ge=0, le=1, default=None)
    """Share of lr left at the last step of a linear, cosine or wsd schedule; null: 0.1. Not for constant."""
    decay_steps: int | None = Field(ge=1, default=None)
    """Steps of wsd's decay, the last one included; null: a tenth of trainer.steps. Only for wsd."""
    weight_decay: float = Field(ge=0, default=0.0)
    """Decoupled weight decay; biases and norm gains are exempt."""
    beta1: float = Field(ge=0, lt=1, default=0.9)
    """AdamW first-moment decay."""
    beta2: float = Field(ge=0, lt=1, default=0.95)
    """AdamW second-moment decay."""
    eps: float = Field(gt=0, default=1e-8)
    """AdamW epsilon."""
    clip_grad: float = Field(gt=0, default=1.0)
    """Global gradient norm above which gradients are scaled down."""
    skip_above_norm: float | None = Field(gt=0, default=None)
    """Global gradient norm, before clipping, above which a step is skipped: weights and moments stay as they are and
    the step counts in optimizer/skipped. Ten such steps in a row end the run. null: no finite gradient is skipped."""

    @model_validator(mode="after")
    def _no_option_without_effect(self) -> "OptimizerConfig":
        if self.schedule == "constant" and self.final_lr_fraction is not None:
            raise ValueError(
                f"final_lr_fraction has no effect with schedule constant, got {self.final_lr_fraction}; "
                "remove it or choose linear, cosine or wsd"
            )
        if self.schedule != "wsd" and self.decay_steps is not None:
            raise ValueError(
                f"decay_steps has no effect with schedule {self.schedule}, got {self.decay_steps}; "
                "remove it or choose wsd"
            )
        if self.skip_above_norm is not None and self.skip_above_norm <= self.clip_grad:
            raise ValueError(
                f"skip_above_norm must be above clip_grad, got {self.skip_above_norm} and {self.clip_grad}: no step "
                "would ever be clipped; ten times the usual grad_norm is a common choice"
            )
        return self


class TrainerConfig(ConfigModel):
    """Length of a run and how it is kept."""

    steps: int = Field(ge=1, default=100)
    """Optimizer steps of the whole run, resumed parts included."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer and learning-rate schedule."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When training state is saved and how much of it is kept."""
    export: bool = True
    """Write the final weights as a Hugging Face folder, RUN/hf."""

    @model_validator(mode="after")
    def _schedule_fits(self) -> "TrainerConfig":
        optimizer = self.optimizer
        if optimizer.schedule == "wsd" and optimizer.warmup_steps + (optimizer.decay_steps or 1) > self.steps:
            raise ValueError(
                f"optimizer.warmup_steps + optimizer.decay_steps must be at most steps, got {optimizer.warmup_steps} + "
                f"{optimizer.decay_steps or 1} > {self.steps}; shorten them or train longer"
            )
        return self


class SftTrainerConfig(TrainerConfig):
    """SFT adds a held-out loss."""

    heldout_every_steps: int = Field(ge=1, default=50)
    """Steps between evaluations of the held-out loss; the last step always has one."""


class RlTrainerConfig(TrainerConfig):
    """RL adds evaluation on held-out prompts and the check of every weight update."""

    eval_every_steps: int = Field(ge=1, default=20)
    """Steps between evaluations on held-out prompts; before the first and after the last step there is always one."""
    probe_tolerance: float = Field(gt=0, default=1e-4)
    """Largest allowed difference between the engine's and the trainer's log-prob of a probe token after an update.
    1e-4 holds in float32. With bfloat16 in model.dtype or engine.dtype the median token decides: set about 0.05."""
    reference: ReferenceConfig | None = None
    """Frozen policy that the KL is taken to; null: none is held. Without loss.kl it is only measured."""
    snr: SnrConfig | None = SnrConfig()
    """Calibrations that tell the ratio's movement from its noise; null: none."""
    logged_rollouts_per_step: int = Field(ge=0, default=8)
    """Rollouts per step written with all their token streams to RUN/rollouts.jsonl."""
    batch_timeout_s: float = Field(gt=0, default=3600.0)
    """Longest wait for the orchestrator's next batch."""
