"""Which tokens count, and sums over them that nothing outside them can spoil."""

import math
from collections.abc import Sequence
from typing import Literal, NoReturn, overload

import numpy as np
import torch
from torch import Tensor

LARGEST_LOGP = 1e-3
"""A log-prob above this is no rounding error of one that is at most 0."""


class BrokenValuesError(ValueError):
    """A stream holds values inside the loss's mask that no computation may have produced."""


@overload
def trained_mask(loss_mask: Tensor, engine_logp: Tensor) -> Tensor: ...
@overload
def trained_mask(loss_mask: np.ndarray, engine_logp: np.ndarray) -> np.ndarray: ...
def trained_mask(loss_mask: Tensor | np.ndarray, engine_logp: Tensor | np.ndarray) -> Tensor | np.ndarray:
    """T of the objective: tokens to be trained whose engine log-prob is known. bool [T], torch or numpy alike.

    NaN (not reported) and -inf (p_mu = 0) are unknown. The loss's denominator counts these tokens over the whole step.
    """
    return loss_mask & (abs(engine_logp) < math.inf)


def reduction_weights(
    tokens_of_rollout: Sequence[int],
    *,
    kind: Literal["token_mean", "sequence_mean", "fixed_length"],
    fixed_length: int | None = None,
) -> tuple[list[float], float]:
    """(what each rollout's token losses are multiplied by, by what their sum over the whole step is divided).

    tokens_of_rollout: size of T in each rollout of the step, over all ranks and microbatches; a rollout without
    tokens adds nothing.

    | kind | weight of a rollout | denominator | a token of a rollout of n counts |
    |---|---|---|---|
    | token_mean | 1 | all tokens | the same everywhere (DAPO 2025) |
    | sequence_mean | 1 / n | rollouts with tokens | 1/n: short answers push harder per token (GRPO 2024) |
    | fixed_length | 1 | rollouts with tokens * fixed_length | the same, whatever the step's lengths (Dr. GRPO 2025) |

    The denominator of a step without tokens is 1. ValueError: a negative count, an unknown kind, a fixed_length that
    is missing, not above 0, not finite or without effect.
    """
    if any(count < 0 for count in tokens_of_rollout):
        raise ValueError(f"a rollout has at least 0 trained tokens, got {min(tokens_of_rollout)}; count its part of T")
    if (fixed_length is not None) != (kind == "fixed_length") or (
        fixed_length is not None and not 0 < fixed_length < math.inf
    ):
        raise ValueError(
            f"fixed_length must be above 0 and finite for the reduction fixed_length and None for others, got "
            f"{fixed_length} for {kind}; rollout.max_new_tokens is a common length"
        )
    rollouts = max(1, sum(count > 0 for count in tokens_of_rollout))
    ones = [1.0] * len(tokens_of_rollout)
    if kind == "token_mean":
        return ones, float(max(1, sum(tokens_of_rollout)))
    if kind == "sequence_mean":
        return [1.0 / max(1, count) for count in tokens_of_rollout], float(rollouts)
    if kind == "fixed_length":
        assert fixed_length is not None, "checked above"
        return ones, float(rollouts * fixed_length)
    raise ValueError(f"reduction must be token_mean, sequence_mean or fixed_length, got {kind!r}")


def fill_outside(stream: Tensor, mask: Tensor, value: float = 0.0) -> Tensor:
    """stream inside mask, value outside, where no gradient flows either. [T]

    Goes in front of the arithmetic: a `where` behind it would multiply the NaN slope of a NaN token by 0, which is NaN.
    """
    return torch.where(mask, stream, value)


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum of values inside mask, a scalar; values outside may be anything, also NaN."""
    return torch.where(mask, values, 0.0).sum()


def masked_max(values: Tensor, mask: Tensor) -> Tensor:
    """Largest of values (none below 0) inside mask, a scalar; 0 if mask is empty."""
    return torch.where(mask, values, 0.0).max() if len(values) else values.new_zeros(())


def check_streams(**streams: Tensor) -> None:
    """ValueError unless all streams are [T] of one length and those named *_mask are bool."""
    (first_name, first), *rest = streams.items()
    if first.dim() != 1:
        raise ValueError(f"{first_name} must be one stream [T], got {list(first.shape)}; pack sequences end to end")
    for name, stream in rest:
        if stream.shape != first.shape:
            raise ValueError(
                f"{name} must be aligned with {first_name} {list(first.shape)}, got {list(stream.shape)}; "
                "pass the streams of one packed batch"
            )
    for name, stream in streams.items():
        if name.endswith("_mask") and stream.dtype != torch.bool:
            raise ValueError(f"{name} must be bool, got {stream.dtype}; compare it with 0 first")


def check_denominator(denominator: float) -> None:
    """ValueError unless above 0 and finite."""
    if not 0 < denominator < math.inf:
        raise ValueError(
            f"denominator must be above 0 and finite, got {denominator}; it is the number of trained tokens of the "
            "whole step, over all ranks and microbatches"
        )


def broken_logps(logp: Tensor, mask: Tensor) -> Tensor:
    """Log-probs inside mask that are NaN, infinite or above 0 by more than rounding. bool [T]"""
    return mask & ~((logp <= LARGEST_LOGP) & (logp > -math.inf))


def raise_broken(name: str, stream: Tensor, broken: Tensor) -> NoReturn:
    """BrokenValuesError that shows the first broken entry of a stream."""
    position = int(broken.nonzero()[0])
    rule, cure = "finite", "look for NaN weights"
    if name == "advantages":
        cure = "look at the rewards"
    if name == "sequence_ids":
        rule, cure = "those of documents in one piece", "number the documents of a batch as they lie"
    if name.endswith("_logp"):
        rule, cure = ("finite and at most 0", "look for NaN weights, or logits or probabilities in place of log-probs")
    value = stream.detach()[position].item()
    raise BrokenValuesError(f"{name} of trained tokens must be {rule}, got {value} at position {position}; {cure}")
