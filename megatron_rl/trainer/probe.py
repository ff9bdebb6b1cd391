"""After every weight update the engines must give fixed texts the trainer's log-probs, or the run stops.

Both sides round differently by about 1e-6. That is harmless except where a router is that close to choosing another
expert: there one side may take the other expert, and this token and all later ones of the text differ visibly though
the weights are the same. So the trainer measures how close its own routers came, and what follows a near tie in a text
does not count. There are several short texts so that enough counts; if less than half would, everything does.

In bfloat16 every router is near a tie for some token, and such a token may be off by nats: one in thirty by more than
0.5, however right the weights are. There the median decides: measured 0.007 with the same weights, above 0.3 with
experts or rows in the wrong order, or with weights of before the training.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from megatron_rl.config import RunError
from megatron_rl.data.packing import pack_samples
from megatron_rl.records import PackedBatch, Sample

PROBE_TEXTS = (
    "Ein Bäcker verkauft drei Dutzend Brötchen.",
    "Jedes Brötchen kostet 0,45 € und wiegt 60 g.",
    "The quick brown fox jumps over the lazy dog.",
    '{"name": "book", "arguments": {"amount": 16.2}}',
    "def f(x): return x**2 + 3*x - 1",
    "Wie hoch ist sein Einkommen? 36 mal 0,45 ist",
    "Let A be a finite set; then |P(A)| = 2^|A|.",
    "user\nWhat is 17 + 25?\nassistant\n42",
)
"""Prose in two languages, digits, JSON and code: every part of a vocabulary that a run is likely to use."""

NEAR_TIE = 2e-5
"""Router margin in float32 below which two correct computations may choose different experts."""


class WeightProbeError(RunError):
    """An engine does not compute what the trainer computes; going on would train on noise."""


class ProbedEngine(Protocol):
    """What the check needs of an engine."""

    url: str

    def prompt_logprobs(self, token_ids: Sequence[int]) -> np.ndarray:
        """Log-probs at temperature 1, float32 [T]; entry 0 is NaN."""
        ...


@dataclass(frozen=True)
class ProbeResult:
    """One check of all engines."""

    max_error: float
    """Largest difference in log-prob among the tokens that count."""
    num_excused: int
    """Tokens beyond the tolerance that did not stop the run: a router was near a tie, or the precision is low."""


class WeightProbe:
    """The texts as token ids, and the batch in which the trainer scores them."""

    def __init__(self, tokenizer: Any, *, pad_multiple: int) -> None:
        self.texts = [[int(t) for t in tokenizer.encode(text, add_special_tokens=False)] for text in PROBE_TEXTS]
        samples = [self._sample(index, ids) for index, ids in enumerate(self.texts)]
        num_tokens = sum(len(ids) for ids in self.texts)
        self.batch: PackedBatch = pack_samples(samples, capacity=num_tokens + pad_multiple, pad_multiple=pad_multiple)[
            0
        ]
        self._order = [int(name) for name in self.batch.sample_ids]

    @staticmethod
    def _sample(index: int, ids: list[int]) -> Sample:
        mask = np.ones(len(ids), dtype=bool)
        mask[0] = False
        return Sample(str(index), np.array(ids, dtype=np.int32), mask)

    def check(
        self,
        engines: Sequence[ProbedEngine],
        policy_logp: np.ndarray,
        router_margin: np.ndarray | None,
        *,
        version: int,
        tolerance: float,
    ) -> ProbeResult:
        """WeightProbeError if an engine differs by more than tolerance on a token that counts.

        policy_logp: [T], the trainer's log-probs of the batch's targets at temperature 1. router_margin: [T] of the
        same forward; None for low precision: every token counts, and the median must be within tolerance.
        """
        counted = self._counted(router_margin)
        max_error, num_excused = 0.0, 0
        for engine in engines:
            error = np.abs(self._engine_logp(engine) - policy_logp.astype(np.float64))
            error = np.where(np.isfinite(error), error, np.inf)[: len(counted)]
            worst = float(error[counted].max())
            typical = float(np.median(error))
            decisive = worst if router_margin is not None or np.isinf(worst) else typical
            if decisive > tolerance:
                raise WeightProbeError(
                    f"after the update to version {version} the engine {engine.url} must give the probe texts the "
                    f"trainer's log-probs within {tolerance:g} (trainer.probe_tolerance), got a difference of "
                    f"{decisive:g}; the engine holds other weights, or computes in another precision: compare "
                    "engine.dtype with model.dtype"
                )
            max_error = max(max_error, worst)
            num_excused += int((error > tolerance).sum())
        return ProbeResult(max_error, num_excused)

    def _counted(self, router_margin: np.ndarray | None) -> np.ndarray:
        """Targets that count, bool [T without padding]: in each text those before its first near tie."""
        num_targets = self.batch.num_tokens - self.batch.num_padding
        counted = np.ones(num_targets, dtype=bool)
        if router_margin is None:
            return counted
        borders = self.batch.cu_seqlens
        for start, end in itertools.pairwise(borders[: len(self.texts) + 1]):
            counted[start:end] = np.logical_and.accumulate(router_margin[start:end] > NEAR_TIE)
        return counted if counted.mean() >= 0.5 else np.ones_like(counted)

    def _engine_logp(self, engine: ProbedEngine) -> np.ndarray:
        """float64 [T], padding NaN, aligned with the batch's targets."""
        parts = [np.asarray(engine.prompt_logprobs(self.texts[i]), dtype=np.float64)[1:] for i in self._order]
        return np.concatenate([*parts, np.full(self.batch.num_padding, np.nan)])
