"""Quantities of whole documents from packed streams [T]; no host transfer, any number of documents.

sequence_ids int [T]: the number of each token's document, each document in one piece; negative: it counts to none.
"""

import torch
from torch import Tensor

from megatron_rl.loss.reduce import check_streams


def check_sequence_ids(sequence_ids: Tensor, **streams: Tensor) -> None:
    """ValueError unless aligned with the streams and of an integer kind."""
    check_streams(**streams, sequence_ids=sequence_ids)
    if sequence_ids.is_floating_point() or sequence_ids.is_complex() or sequence_ids.dtype == torch.bool:
        raise ValueError(f"sequence_ids must be integers, got {sequence_ids.dtype}; number the documents from 0")


def sequence_mean(values: Tensor, sequence_ids: Tensor) -> Tensor:
    """Mean over the token's document, at every token of it; 0 where the token counts to none. [T], no gradient

    Summed in float64, in an order that the shapes alone decide: ranks that hold the same values get the same bits, and
    so decide alike at the edge of a clip range. ValueError: shapes that disagree, sequence_ids that are no integers.
    """
    check_sequence_ids(sequence_ids, values=values)
    if not len(values):
        return values.detach().clone()
    runs, counted = _runs(sequence_ids), sequence_ids >= 0
    empty = runs.new_zeros(len(values) + 1)
    sizes, counts = (empty.index_add(0, runs, ones.long()) for ones in (torch.ones_like(counted), counted))
    # Sums of floats by index_add and cumsum depend on the timing of a GPU's threads.
    totals = torch.segment_reduce(
        torch.where(counted, values.detach(), 0.0).double(), "sum", lengths=sizes, unsafe=True
    )
    return torch.where(counted, (totals / counts.clamp(min=1))[runs], 0.0).to(values.dtype)


def later_sum(values: Tensor, sequence_ids: Tensor) -> Tensor:
    """Sum over the tokens behind this one in its document; 0 where the token counts to none. [T], no gradient

    Summed in float64. ValueError: shapes that disagree, sequence_ids that are no integers.
    """
    check_sequence_ids(sequence_ids, values=values)
    if not len(values):
        return values.detach().clone()
    slots, counted = _slots(sequence_ids), sequence_ids >= 0
    running = torch.where(counted, values.detach(), 0.0).double().cumsum(0)
    positions = torch.arange(len(values), device=values.device)
    last = positions.new_zeros(len(values) + 1).scatter_reduce(0, slots, positions, "amax")
    return torch.where(counted, running[last[slots]] - running, 0.0).to(values.dtype)


def after_observation(loss_mask: Tensor, sequence_ids: Tensor) -> Tensor:
    """Tokens to be trained whose predecessor in the document is not, but for the document's first. bool [T]

    Those are the first tokens the policy writes after each observation; the first of all follows the prompt.
    ValueError: shapes that disagree, a mask that is not bool, sequence_ids that are no integers.
    """
    check_sequence_ids(sequence_ids, loss_mask=loss_mask)
    if not len(loss_mask):
        return loss_mask.clone()
    before = torch.zeros_like(loss_mask)
    before[1:] = loss_mask[:-1]  # across a border it says nothing, but there the token is its document's first
    slots = _slots(sequence_ids)
    positions = torch.arange(len(loss_mask), device=loss_mask.device)
    far = len(loss_mask)
    first = positions.new_full((far + 1,), far).scatter_reduce(0, slots, torch.where(loss_mask, positions, far), "amin")
    return loss_mask & ~before & (positions != first[slots]) & (sequence_ids >= 0)


def returning(sequence_ids: Tensor) -> Tensor:
    """Where a document's number comes back after another's, which every sum here takes for a new document. bool [T]"""
    check_sequence_ids(sequence_ids)
    runs = _runs(sequence_ids)
    starts = (sequence_ids >= 0) & (runs.diff(prepend=runs.new_zeros(1)) > 0)
    # Other tokens get a number of their own below 0, so that only starts can be alike.
    own = -1 - torch.arange(len(runs), device=runs.device)
    numbers, order = torch.where(starts, sequence_ids.long(), own).sort(stable=True)
    again = torch.zeros_like(starts)
    again[order[1:]] = numbers[1:] == numbers[:-1]
    return again


def _slots(sequence_ids: Tensor) -> Tensor:
    """Index of the token's document in a table of T + 1, whatever the numbers are; 0 for tokens that count to none."""
    return torch.where(sequence_ids >= 0, _runs(sequence_ids), 0)


def _runs(sequence_ids: Tensor) -> Tensor:
    """_slots, but tokens that count to none have the slot of the document before them: it never falls. 1 to T"""
    positions = torch.arange(len(sequence_ids), device=sequence_ids.device)
    last_counted = torch.where(sequence_ids >= 0, positions, 0).cummax(0).values
    document = sequence_ids.long()[last_counted]
    starts = torch.ones_like(positions)
    starts[1:] = (document[1:] != document[:-1]).long()
    return starts.cumsum(0)
