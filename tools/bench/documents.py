"""What both sides train on: the same documents in every step, packed for ours, padded for theirs."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_rl.records import Sample

NUM_STEPS = 4
"""Steps with documents of their own, taken in turn: a run never sees the same shapes twice in a row."""
NUM_DOCUMENTS = 64
LENGTHS = (32, 128)
"""Shortest and longest document."""
ROWS = 16
"""Documents that the plain loop pads into one batch."""


@dataclass(frozen=True)
class PaddedBatch:
    """token ids and labels [rows, longest]; label -100 where there is nothing to predict."""

    ids: Tensor
    labels: Tensor


def steps_of_samples() -> list[list[Sample]]:
    """The documents of each step; all tokens but a document's first are trained."""
    random = np.random.default_rng(0)
    steps = []
    for step in range(NUM_STEPS):
        lengths = random.integers(LENGTHS[0], LENGTHS[1] + 1, NUM_DOCUMENTS)
        samples = []
        for number, length in enumerate(lengths):
            mask = np.ones(length, dtype=bool)
            mask[0] = False
            samples.append(Sample(f"{step}-{number}", random.integers(10, 500, length).astype(np.int32), mask))
        steps.append(samples)
    return steps


def num_trained(samples: list[Sample]) -> int:
    """Targets of a step."""
    return sum(len(sample.token_ids) - 1 for sample in samples)


def padded(samples: list[Sample], *, rank: int = 0, world_size: int = 1) -> list[PaddedBatch]:
    """This rank's batches of ROWS documents of similar length, so that padding costs little.

    Short and long ones are dealt out forth and back, so that ranks have about the same number of tokens.
    """
    ordered = sorted(samples, key=lambda sample: len(sample.token_ids))
    batches = []
    for start in range(0, len(ordered), ROWS):
        part = ordered[start : start + ROWS]
        longest = max(len(sample.token_ids) for sample in part)
        ids = torch.zeros(len(part), longest, dtype=torch.long)
        labels = torch.full((len(part), longest), -100)
        for row, sample in enumerate(part):
            tokens = torch.tensor(sample.token_ids, dtype=torch.long)
            ids[row, : len(tokens)], labels[row, 1 : len(tokens)] = tokens, tokens[1:]
        batches.append(PaddedBatch(ids, labels))
    turn = [*range(world_size), *reversed(range(world_size))]
    return [batch for number, batch in enumerate(batches) if turn[number % len(turn)] == rank]
