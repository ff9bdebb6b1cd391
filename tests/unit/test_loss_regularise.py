"""Entropy bonus, the tokens it is given for, and sums over documents; squared_log_ratio is in test_loss_policy."""

import math
from itertools import pairwise
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_rl.loss.regularise import bonus_tokens, entropy_bonus
from megatron_rl.loss.sequences import after_observation, later_sum, returning, sequence_mean

DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)


def entropy_of(logits: Tensor) -> Tensor:
    """Of each row. [T]"""
    logp = logits.log_softmax(-1)
    return -(logp.exp() * logp).sum(-1)


@DTYPES
def test_the_bonus_has_the_exact_entropy_gradient_inside_its_mask_and_none_outside(dtype: torch.dtype) -> None:
    """On the logits p (log p + H), written out; autograd through log_softmax agrees."""
    logits = torch.randn(4, 7, generator=torch.Generator().manual_seed(2), dtype=dtype).requires_grad_()
    mask = torch.tensor([True, False, True, False])
    entropy = entropy_of(logits)
    bonus = entropy_bonus(entropy, mask)
    gradient = torch.autograd.grad(bonus.sum(), logits)[0]
    logp = logits.detach().log_softmax(-1)
    exact = torch.where(mask[:, None], logp.exp() * (logp + entropy_of(logits).detach()[:, None]), 0.0)
    torch.testing.assert_close(gradient, exact)
    torch.testing.assert_close(bonus.detach(), torch.where(mask, -entropy.detach(), 0.0))


def test_a_nan_outside_the_mask_stays_there() -> None:
    entropy = torch.tensor([1.0, math.nan], requires_grad=True)
    bonus = entropy_bonus(entropy, torch.tensor([True, False]))
    bonus.sum().backward()
    assert bonus.tolist() == [-1.0, 0.0]
    assert entropy.grad is not None and entropy.grad.tolist() == [-1.0, 0.0]


def test_the_tokens_after_observations_are_the_first_ones_of_later_turns() -> None:
    """Two documents with prompt and turns, one that starts with a trained token, one all observation, padding."""
    turns = "..ab.c...de|.f.g|hi.j|...|"  # a letter is a trained token, a bar ends a document
    mask, ids, number = [], [], 0
    for character in turns:
        if character == "|":
            number += 1
            continue
        mask.append(character != ".")
        ids.append(number)
    got = after_observation(torch.tensor(mask), torch.tensor(ids))
    letters = turns.replace("|", "")
    assert "".join(letter for letter, chosen in zip(letters, got.tolist(), strict=True) if chosen) == "cdgj"


MASKED_DOCUMENTS = st.lists(st.lists(st.booleans(), max_size=6), max_size=5)


@given(documents=MASKED_DOCUMENTS)
def test_after_observation_agrees_with_a_walk_through_each_document(documents: list[list[bool]]) -> None:
    want = []
    for document in documents:
        pairs = pairwise([True, *document]) if document else []
        starts = [now and not before for before, now in pairs]
        first = document.index(True) if True in document else -1
        want += [start and t != first for t, start in enumerate(starts)]
    mask = torch.tensor([token for document in documents for token in document], dtype=torch.bool)
    ids = torch.tensor([n for n, document in enumerate(documents) for _ in document], dtype=torch.long)
    assert after_observation(mask, ids).tolist() == want
    assert bonus_tokens(mask, ids, tokens="after_observation").tolist() == want
    assert torch.equal(bonus_tokens(mask, None, tokens="all"), mask)


VALUES = st.lists(st.tuples(st.floats(-3, 3), st.booleans()), max_size=6)


@given(documents=st.lists(VALUES, max_size=5))
def test_sums_and_means_over_documents_agree_with_a_walk(documents: list[list[tuple[float, bool]]]) -> None:
    """Tokens that count to no document (False here) hold NaN, and are passed over."""
    values = [value if counts else math.nan for document in documents for value, counts in document]
    ids = [n if counts else -1 for n, document in enumerate(documents) for _, counts in document]
    means, laters = [], []
    for document in documents:
        counted = [value for value, counts in document if counts]
        for position, (_, counts) in enumerate(document):
            behind = [value for value, behind_counts in document[position + 1 :] if behind_counts]
            means.append(sum(counted) / len(counted) if counts else 0.0)
            laters.append(sum(behind) if counts else 0.0)
    stream, numbers = torch.tensor(values, dtype=torch.float64), torch.tensor(ids, dtype=torch.int32)
    assert sequence_mean(stream, numbers).tolist() == pytest.approx(means, abs=1e-12)
    assert later_sum(stream, numbers).tolist() == pytest.approx(laters, abs=1e-12)


def test_a_number_that_comes_back_after_another_is_found_and_one_behind_uncounted_tokens_is_not() -> None:
    ids = torch.tensor([5, 5, -1, 5, 2, -1, -1, 5, 2, 2, 0])
    assert returning(ids).nonzero().flatten().tolist() == [7, 8]
    assert not returning(torch.tensor([-3, 7, 7])).any() and returning(ids[:0]).tolist() == []


def test_a_later_sum_keeps_its_digits_behind_many_documents() -> None:
    """A float32 running sum over 200,000 tokens would be off by more than the last document holds."""
    values = torch.full((200_000,), 1000.0)
    values[-2:] = 1e-3
    ids = torch.arange(200_000) // 2
    assert float(later_sum(values, ids)[-2]) == pytest.approx(1e-3, rel=1e-3)


STEPS = st.lists(st.lists(st.integers(-(2**23), 2**23), min_size=1, max_size=40), min_size=1, max_size=5)
"""Documents of multiples of 2^-20: their sums are exact in float64 and mostly not in float32."""


@given(documents=STEPS, random=st.randoms())
def test_a_mean_has_the_same_bits_whatever_the_order_of_tokens_and_documents(
    documents: list[list[int]], random: Random
) -> None:
    order = random.sample(range(len(documents)), len(documents))
    for shown in (documents, [random.sample(documents[n], len(documents[n])) for n in order]):
        values = torch.tensor([step * 2.0**-20 for document in shown for step in document], dtype=torch.float32)
        ids = torch.tensor([n for n, document in enumerate(shown) for _ in document])
        exact = [sum(document) * 2.0**-20 / len(document) for document in shown for _ in document]
        means = sequence_mean(values, ids)
        assert means.dtype == torch.float32 and torch.equal(means, torch.tensor(exact, dtype=torch.float64).float())


def test_a_broken_value_spoils_the_mean_of_its_own_document_alone() -> None:
    means = sequence_mean(torch.tensor([1.0, math.nan, 2.0, math.inf, 3.0, 5.0]), torch.tensor([0, 0, 1, 1, 2, 2]))
    assert means[:2].isnan().all() and means[2:].tolist() == [math.inf, math.inf, 4.0, 4.0]


def test_bad_arguments_are_refused_with_their_value() -> None:
    one, two, mask = torch.zeros(1), torch.zeros(2), torch.ones(1, dtype=torch.bool)
    with pytest.raises(ValueError, match="loss_mask must be aligned with entropy"):
        entropy_bonus(two, mask)
    with pytest.raises(ValueError, match=r"loss_mask must be bool, got torch\.float32"):
        entropy_bonus(one, one)
    with pytest.raises(ValueError, match="needs sequence_ids, got None"):
        bonus_tokens(mask, None, tokens="after_observation")
    with pytest.raises(ValueError, match="tokens must be all or after_observation, got 'first'"):
        bonus_tokens(mask, None, tokens="first")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    for ids in (one, mask):
        with pytest.raises(ValueError, match=f"sequence_ids must be integers, got {ids.dtype}"):
            sequence_mean(one, ids)
        with pytest.raises(ValueError, match=f"sequence_ids must be integers, got {ids.dtype}"):
            later_sum(one, ids)
    with pytest.raises(ValueError, match="sequence_ids must be aligned with loss_mask"):
        after_observation(mask, two.long())
