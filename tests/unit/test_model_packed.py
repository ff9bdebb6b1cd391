"""Attention over packed documents: its layout, and its values and gradients against float64."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.model.attention import PackedAttention
from megatron_rl.model.packed import MAX_PADDING_SHARE, document_cells, document_positions, pack_documents

ONE_RANK = SimpleNamespace(cp=None)
LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=30).filter(lambda lengths: sum(lengths) > 0)


@given(LENGTHS)
def test_every_token_has_one_cell_inside_a_bucket_in_document_order(lengths: list[int]) -> None:
    cells = document_cells(lengths)
    num_cells = sum(bucket.num_documents * bucket.length for bucket in cells.buckets)
    num_tokens = sum(lengths)
    if cells.cell_of_token is None or cells.token_of_cell is None:
        assert len(cells.buckets) == 1 and num_cells == num_tokens
        return
    assert len(set(cells.cell_of_token.tolist())) == num_tokens
    assert torch.equal(cells.token_of_cell[cells.cell_of_token], torch.arange(num_tokens))
    starts = {0}
    for bucket in cells.buckets:
        starts |= {bucket.first_cell + d * bucket.length for d in range(bucket.num_documents)}
    positions = document_positions(lengths)
    for token, cell in enumerate(cells.cell_of_token.tolist()):
        assert cell - int(positions[token]) in starts, "a document's tokens lie in its own row, from the first cell on"


@given(LENGTHS)
def test_padding_stays_below_its_share_of_a_bucket(lengths: list[int]) -> None:
    cells = document_cells(lengths)
    num_cells = sum(bucket.num_documents * bucket.length for bucket in cells.buckets)
    assert num_cells - sum(lengths) <= MAX_PADDING_SHARE * num_cells


@given(LENGTHS)
def test_positions_restart_at_each_document(lengths: list[int]) -> None:
    assert document_positions(lengths).tolist() == [p for length in lengths for p in range(length)]


def exact_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: list[int], rotary_dim: int
) -> torch.Tensor:
    """RoPE and softmax written out, one document and one query head at a time, in the dtype of the arguments."""
    heads, head_dim = query.shape[1:]
    group = heads // key.shape[1]
    frequencies = 1e4 ** -(torch.arange(0, rotary_dim, 2, dtype=query.dtype) / rotary_dim)
    rows = []
    start = 0
    for length in lengths:
        angles = torch.arange(length, dtype=query.dtype)[:, None] * frequencies

        def rotate(x: torch.Tensor, angles: torch.Tensor = angles) -> torch.Tensor:
            first, second = x[:, :rotary_dim].chunk(2, dim=-1)
            turned = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)
            return torch.cat([turned.real, turned.imag, x[:, rotary_dim:]], dim=-1)

        span = slice(start, start + length)
        out = []
        for head in range(heads):
            q, k, v = rotate(query[span, head]), rotate(key[span, head // group]), value[span, head // group]
            scores = (q @ k.T / head_dim**0.5).masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
            out.append(scores.softmax(-1) @ v)
        rows.append(torch.cat(out, dim=-1))
        start += length
    return torch.cat(rows)


@pytest.mark.parametrize(
    ("lengths", "rotary_dim"), [([7, 1, 30, 0, 12, 31], 16), ([8, 8, 8], 16), ([25], 16), ([20, 20, 5], 8)]
)
def test_values_and_gradients_are_as_good_as_an_honest_float32_reference(lengths: list[int], rotary_dim: int) -> None:
    torch.manual_seed(1)
    num_tokens, heads, kv_heads, head_dim = sum(lengths), 4, 2, 16
    exact = [torch.randn(num_tokens, n, head_dim, dtype=torch.float64) for n in (heads, kv_heads, kv_heads)]
    upstream = torch.randn(num_tokens, heads * head_dim, dtype=torch.float64)

    def run(attend: Callable[..., torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
        inputs = [x.to(dtype).requires_grad_() for x in exact]
        out = attend(*inputs)
        return [out.detach(), *torch.autograd.grad((out * upstream.to(dtype)).sum(), inputs)]

    def written_out(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return exact_attention(query, key, value, lengths, rotary_dim)

    layer = PackedAttention(SimpleNamespace(kv_channels=head_dim), pg_collection=ONE_RANK)  # type: ignore[arg-type]
    documents = pack_documents(lengths, rotary_dim=rotary_dim, rope_base=1e4, dtype=torch.float32)

    def packed(*inputs: torch.Tensor) -> torch.Tensor:
        return layer(*(x.unsqueeze(1) for x in inputs), None, packed_seq_params=documents).squeeze(1)

    truth = run(written_out, torch.float64)
    honest = run(written_out, torch.float32)
    for got, plain, want in zip(run(packed, torch.float32), honest, truth, strict=True):
        assert (got - want).abs().max() <= 2 * (plain - want).abs().max()


def test_documents_do_not_see_each_other_or_the_padding() -> None:
    """NaN in one document leaves every other document, forward and backward, as it was."""
    torch.manual_seed(2)
    lengths = [5, 9, 6]
    layer = PackedAttention(SimpleNamespace(kv_channels=8), pg_collection=ONE_RANK)  # type: ignore[arg-type]
    documents = pack_documents(lengths, rotary_dim=8, rope_base=1e4, dtype=torch.float32)
    clean = [torch.randn(20, 1, n, 8) for n in (2, 1, 1)]
    poisoned = [x.clone() for x in clean]
    for x in poisoned:
        x[5:14] = torch.nan
    results = []
    for inputs in (clean, poisoned):
        inputs = [x.requires_grad_() for x in inputs]
        out = layer(*inputs, None, packed_seq_params=documents)
        kept = torch.cat([out[:5], out[14:]])
        kept.square().sum().backward()
        results.append([kept.detach(), *(torch.cat([x.grad[:5], x.grad[14:]]) for x in inputs)])  # type: ignore
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
