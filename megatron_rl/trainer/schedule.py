"""Learning rate by step."""

import math

from megatron_rl.trainer.config import OptimizerConfig


def learning_rate(config: OptimizerConfig, *, step: int, total_steps: int) -> float:
    """Learning rate of 0-based step: linear warm-up, then the schedule down to the last step."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    progress = min(1.0, (step - config.warmup_steps) / max(1, total_steps - 1 - config.warmup_steps))
    shape = 1.0 - progress if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    final = 0.1 if config.final_lr_fraction is None else config.final_lr_fraction
    return config.lr * (final + (1.0 - final) * shape)
