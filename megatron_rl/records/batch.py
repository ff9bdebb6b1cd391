"""PackedBatch: documents end to end, inputs and targets already shifted; StepBatch: one optimizer step."""

from typing import Any

import msgspec
import numpy as np


class PackedBatch(msgspec.Struct):
    """One microbatch of one data-parallel rank. A sample of n tokens fills n-1 positions.

    Position t reads input_ids[t] and predicts target_ids[t]; every other stream is aligned with the target.
    Documents never see each other (cu_seqlens). Padding is the last document, untrained.
    """

    input_ids: np.ndarray
    """int32 [T]"""
    target_ids: np.ndarray
    """int32 [T]"""
    loss_mask: np.ndarray
    """bool [T]: the target is trained."""
    cu_seqlens: np.ndarray
    """int32 [D+1]: document borders; first 0, last T, the padding document included."""
    sample_ids: list[str]
    """One per document, without the padding document."""
    num_padding: int = 0
    advantages: np.ndarray | None = None
    """float32 [T], RL only."""
    engine_logp: np.ndarray | None = None
    """float32 [T], RL only; NaN where the engine gave none."""
    weight_version: np.ndarray | None = None
    """int32 [T], RL only."""
    loss_weight: np.ndarray | None = None
    """float32 [T]: what the reduction multiplies each token's loss by; None: 1 everywhere."""
    reference_logp: np.ndarray | None = None
    """float32 [T]: of the frozen reference policy. The trainer adds it where the objective asks for one."""
    proximal_logp: np.ndarray | None = None
    """float32 [T]: of the trainer's weights at the last weight update, for the decoupled objective."""
    info: list[dict[str, Any]] = []
    """One per document: Sample.info."""

    @property
    def num_tokens(self) -> int:
        """Positions, padding included."""
        return len(self.input_ids)

    @property
    def num_trained(self) -> int:
        """Trained targets."""
        return int(self.loss_mask.sum())


class StepBatch(msgspec.Struct):
    """Everything one optimizer step trains on."""

    step: int
    microbatches: list[list[PackedBatch]]
    """[data-parallel rank][microbatch]; every rank has the same number of microbatches."""
    num_trained: int
    """Trained targets of all ranks and microbatches."""
    denominator: float
    """What the step's weighted sum of token losses is divided by, on every rank and microbatch alike."""
    metrics: dict[str, tuple[str, float, float]] = {}
    """What the orchestrator measured: name -> telemetry value in wire form."""
