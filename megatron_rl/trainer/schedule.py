"""Learning rate by step."""

import math

from megatron_rl.trainer.config import OptimizerConfig


def learning_rate(config: OptimizerConfig, *, step: int, total_steps: int) -> float:
    """Learning rate of 0-based step: linear warm-up, then the schedule down to the last step.

    wsd is warm-up, stable, decay (Hu et al. 2024), with the linear decay of Hägele et al. 2024.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    final = 0.1 if config.final_lr_fraction is None else config.final_lr_fraction
    return config.lr * (final + (1.0 - final) * _shape(config, step, total_steps))


def _shape(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """1 at the peak, 0 at the last step."""
    if config.schedule == "wsd":
        decay_steps = config.decay_steps or max(1, min(total_steps // 10, total_steps - config.warmup_steps))
        return min(1.0, max(0.0, (total_steps - 1 - step) / decay_steps))
    progress = min(1.0, (step - config.warmup_steps) / max(1, total_steps - 1 - config.warmup_steps))
    return 1.0 - progress if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
