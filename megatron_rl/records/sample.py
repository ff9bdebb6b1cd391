"""One token sequence with aligned per-token streams: what SFT rows and RL segments become."""

from typing import Any

import msgspec
import numpy as np


class Sample(msgspec.Struct):
    """All streams are [T] and aligned with token_ids: entry t belongs to token t as a prediction target."""

    sample_id: str
    token_ids: np.ndarray
    """int32 [T]"""
    loss_mask: np.ndarray
    """bool [T]: token t is a trained target. Token 0 has no predecessor and is never trained."""
    advantages: np.ndarray | None = None
    """float32 [T], RL only."""
    engine_logp: np.ndarray | None = None
    """float32 [T], RL only; NaN where the engine gave none."""
    weight_version: np.ndarray | None = None
    """int32 [T], RL only; -1 where not sampled."""
    loss_weight: np.ndarray | None = None
    """float32 [T]: what the reduction multiplies each token's loss by; None: 1 everywhere."""
    info: dict[str, Any] = {}
    """For people (reward, environment, group): goes to the sampled-rollout log, never into the loss."""

    def __post_init__(self) -> None:
        num_tokens = len(self.token_ids)
        for name in ("loss_mask", "advantages", "engine_logp", "weight_version", "loss_weight"):
            stream = getattr(self, name)
            if stream is not None and len(stream) != num_tokens:
                raise ValueError(
                    f"Sample.{name} must have one entry per token: expected {num_tokens}, got {len(stream)}"
                )
        if num_tokens and self.loss_mask[0]:
            raise ValueError(f"Sample {self.sample_id}: token 0 has no predecessor and cannot be trained")
