"""What the stages hand to each other. Pure data: no torch, no behaviour beyond shape checks."""

from megatron_rl.records.batch import PackedBatch, StepBatch
from megatron_rl.records.rollout import Prompt, Rollout, RolloutGroup, Segment
from megatron_rl.records.sample import Sample
from megatron_rl.records.weights import TensorSlot, WeightManifest

__all__ = [
    "PackedBatch",
    "Prompt",
    "Rollout",
    "RolloutGroup",
    "Sample",
    "Segment",
    "StepBatch",
    "TensorSlot",
    "WeightManifest",
]
