"""How context-parallel ranks share the tokens of a packed batch."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.model.context import context_shard
from megatron_rl.model.packed import context_cells, document_positions

LENGTHS = st.lists(st.integers(0, 30), min_size=1, max_size=12).filter(lambda lengths: sum(lengths) > 0).map(tuple)
SIZES = st.sampled_from([2, 3, 4])


@given(LENGTHS, SIZES, st.sampled_from([1, 2]))
def test_every_token_is_on_one_rank_and_comes_back_to_its_place(
    lengths: tuple[int, ...], context_size: int, tensor_size: int
) -> None:
    shard = context_shard(lengths, context_size=context_size, tensor_size=tensor_size)
    tokens = torch.arange(1, sum(lengths) + 1)
    padded = torch.where(shard.is_padding, 0, tokens[shard.source])
    everyone = padded[shard.of_rank].flatten()
    assert sorted(everyone[everyone > 0].tolist()) == tokens.tolist()
    assert torch.equal(everyone[shard.place_of_token], tokens)
    assert shard.of_rank.shape[1] % tensor_size == 0
    assert sum(shard.lengths) == shard.of_rank.numel()


@given(LENGTHS, SIZES)
def test_attention_costs_every_rank_the_same(lengths: tuple[int, ...], context_size: int) -> None:
    shard = context_shard(lengths, context_size=context_size, tensor_size=1)
    pairs = (document_positions(shard.lengths) + 1)[shard.of_rank].sum(1)
    assert len(set(pairs.tolist())) == 1


def test_a_rank_takes_the_outer_or_the_inner_chunks_of_a_document() -> None:
    shard = context_shard((8, 3), context_size=2, tensor_size=1)
    assert shard.of_rank.tolist() == [[0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10]]
    assert shard.is_padding.nonzero().flatten().tolist() == [11]


@given(LENGTHS, SIZES)
def test_a_query_sees_the_earlier_tokens_of_its_document_and_no_other(
    lengths: tuple[int, ...], context_size: int
) -> None:
    shard = context_shard(lengths, context_size=context_size, tensor_size=1)
    order = shard.of_rank.flatten()
    document = torch.repeat_interleave(torch.arange(len(shard.lengths)), torch.tensor(shard.lengths))
    for rank in range(context_size):
        cells = context_cells(shard.lengths, shard.of_rank, rank)
        seen: list[list[int]] = []
        for bucket in cells.buckets:
            for keys, visible in zip(bucket.keys, bucket.visible[:, 0], strict=True):
                assert visible.any(1).all(), "a softmax over nothing would be NaN"
                seen += [sorted(order[keys[row]].tolist()) for row in visible]
        for cell, token in zip(cells.cell_of_token.tolist(), shard.of_rank[rank].tolist(), strict=True):
            first = int((document < document[token]).sum())
            assert seen[cell] == list(range(first, token + 1))
