"""What an engine answers."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

INITIAL_VERSION = 0
"""Version of tokens sampled before the first weight update: the checkpoint that the engine was started with."""


@dataclass(frozen=True)
class Completion:
    """One sampled continuation. Streams are [T], aligned with token_ids."""

    token_ids: np.ndarray
    """int32 [T], the stop token included."""
    logp: np.ndarray
    """float32 [T], at the sampling temperature (greedy: at temperature 1); NaN where the engine's was not finite."""
    weight_version: np.ndarray
    """int32 [T]: version of the weights that computed this token's logits, as the engine noted at that moment."""
    finish_reason: Literal["stop", "length"]
