"""After every weight update the engines must give a fixed text the trainer's log-probs, or the run stops."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from megatron_rl.data.packing import pack_samples
from megatron_rl.records import PackedBatch, Sample

PROBE_TEXT = (
    "Ein Bäcker verkauft drei Dutzend Brötchen. Jedes Brötchen kostet 0,45 €. "
    'Three dozen are 36: {"name": "book", "arguments": {"amount": 16.2}} def f(x): return x**2'
)
"""Prose in two languages, digits and JSON: every part of a vocabulary that a run is likely to use."""


class WeightProbeError(Exception):
    """An engine does not compute what the trainer computes; going on would train on noise."""


class ProbedEngine(Protocol):
    """What the check needs of an engine."""

    url: str

    def prompt_logprobs(self, token_ids: Sequence[int]) -> np.ndarray:
        """Log-probs at temperature 1, float32 [T]; entry 0 is NaN."""
        ...


def probe_batch(tokenizer: Any, *, pad_multiple: int) -> tuple[list[int], PackedBatch]:
    """The probe's token ids and the batch that scores them."""
    token_ids = [int(t) for t in tokenizer.encode(PROBE_TEXT, add_special_tokens=False)]
    mask = np.ones(len(token_ids), dtype=bool)
    mask[0] = False
    sample = Sample("probe", np.array(token_ids, dtype=np.int32), mask)
    capacity = -(-len(token_ids) // pad_multiple) * pad_multiple
    return token_ids, pack_samples([sample], capacity=capacity, pad_multiple=pad_multiple)[0]


def check_probe(
    engines: Sequence[ProbedEngine], token_ids: Sequence[int], policy_logp: torch.Tensor, *, version: int, tolerance: float
) -> float:
    """Largest difference in log-prob over all engines; WeightProbeError above tolerance.

    policy_logp: [T-1], the trainer's log-probs of token_ids[1:] at temperature 1.
    """
    worst = 0.0
    for engine in engines:
        engine_logp = np.asarray(engine.prompt_logprobs(token_ids), dtype=np.float64)[1:]
        difference = np.abs(engine_logp - policy_logp.double().numpy())
        error = float(difference.max())
        if not error <= tolerance:
            at = int(difference.argmax()) + 1
            raise WeightProbeError(
                f"after the update to version {version} the engine {engine.url} must give the probe text the trainer's "
                f"log-probs within {tolerance:g} (trainer.probe_tolerance), got {error:g} at token {at}; the engine holds "
                "other weights or computes in another precision: compare engine.dtype with model.dtype"
            )
        worst = max(worst, error)
    return worst
