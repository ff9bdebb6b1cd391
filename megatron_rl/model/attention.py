"""Causal attention inside each document of a packed sequence, by torch's own kernels: the CPU's core attention."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_rl.model.packed import ContextCells, DocumentCells, PackedDocuments

FLOAT32_BELOW = 512
"""Keys of a document below which torch's bfloat16 kernel loses to float32: its backward takes six times as long."""


class PackedAttention(MegatronModule):
    """RoPE, then softmax attention over the earlier tokens of the same document.

    Documents of similar length are padded into one batch: with a causal mask, right padding needs no mask of its own.
    Under context parallelism keys and values are gathered from all ranks, queries stay where they are.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection,
        **_unused: Any,
    ) -> None:
        super().__init__(config)
        self.cp_group = pg_collection.cp
        self.softmax_scale = softmax_scale or (config.kv_channels or 1) ** -0.5

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        _attention_mask: Any,
        *,
        packed_seq_params: PackedDocuments,
        **_unused: Any,
    ) -> Tensor:
        """query [T, 1, heads, head_dim], key and value [T, 1, kv heads, head_dim] -> [T, 1, heads * head_dim].

        T is the whole packed sequence, or this context-parallel rank's part of it; the heads are this rank's.
        """
        documents = packed_seq_params
        assert documents.rope_cos is not None and documents.rope_sin is not None, "built by pack_documents"
        query = _Rotate.apply(query.squeeze(1), documents.rope_cos, documents.rope_sin)
        key = _Rotate.apply(key.squeeze(1), documents.rope_cos, documents.rope_sin)
        if documents.context is not None:
            return self._across_ranks(query, key, value.squeeze(1), documents.context)
        cells = documents.cells
        query, key, value = (_to_cells(stream, cells) for stream in (query, key, value.squeeze(1)))
        outputs = [self._attend(query, key, value, *self._span(bucket)) for bucket in cells.buckets]
        output = _to_tokens(outputs[0] if len(outputs) == 1 else torch.cat(outputs), cells)
        return output.flatten(1).unsqueeze(1)

    def _across_ranks(self, query: Tensor, key: Tensor, value: Tensor, context: ContextCells) -> Tensor:
        """Each stream [T_local, heads, head_dim] -> [T_local, 1, heads * head_dim]."""
        gather = partial(gather_from_sequence_parallel_region, tensor_parallel_output_grad=True, group=self.cp_group)
        key, value = gather(key), gather(value)
        outputs = []
        for bucket in context.buckets:
            q, k, v = (
                x[at].transpose(1, 2) for x, at in ((query, bucket.queries), (key, bucket.keys), (value, bucket.keys))
            )
            out = softmax_attention(q, k, v, attn_mask=bucket.visible, scale=self.softmax_scale)
            outputs.append(out.transpose(1, 2).flatten(0, 1))
        return torch.cat(outputs)[context.cell_of_token].flatten(1).unsqueeze(1)

    @staticmethod
    def _span(bucket: Any) -> tuple[slice, int, int]:
        num_cells = bucket.num_documents * bucket.length
        return slice(bucket.first_cell, bucket.first_cell + num_cells), bucket.num_documents, bucket.length

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, span: slice, num_documents: int, length: int
    ) -> Tensor:
        """[cells of the bucket, heads, head_dim]"""
        q, k, v = (x[span].unflatten(0, (num_documents, length)).transpose(1, 2) for x in (query, key, value))
        out = softmax_attention(q, k, v, is_causal=True, scale=self.softmax_scale)
        return out.transpose(1, 2).flatten(0, 1)


def softmax_attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """[documents, heads, queries, head_dim], in float32 where that is faster and then rounded to query's dtype."""
    dtype = query.dtype
    if key.shape[2] < FLOAT32_BELOW:
        query, key, value = query.float(), key.float(), value.float()
    return F.scaled_dot_product_attention(query, key, value, enable_gqa=True, **options).to(dtype)


def _to_cells(stream: Tensor, cells: DocumentCells) -> Tensor:
    return stream if cells.token_of_cell is None else _ToCells.apply(stream, cells.token_of_cell, cells.cell_of_token)


def _to_tokens(stream: Tensor, cells: DocumentCells) -> Tensor:
    return stream if cells.cell_of_token is None else _ToTokens.apply(stream, cells.cell_of_token)


class _ToCells(torch.autograd.Function):
    """Copies tokens into their cells. Gradients of padding cells are dropped, so the way back is a plain gather."""

    @staticmethod
    def forward(ctx: Any, stream: Tensor, token_of_cell: Tensor, cell_of_token: Tensor) -> Tensor:
        ctx.save_for_backward(cell_of_token)
        return stream.index_select(0, token_of_cell)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = grads
        (cell_of_token,) = ctx.saved_tensors
        return grad.index_select(0, cell_of_token), None, None


class _ToTokens(torch.autograd.Function):
    """Reads tokens back from their cells; padding cells get gradient zero."""

    @staticmethod
    def forward(ctx: Any, stream: Tensor, cell_of_token: Tensor) -> Tensor:
        ctx.save_for_backward(cell_of_token)
        ctx.num_cells = stream.shape[0]
        return stream.index_select(0, cell_of_token)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        (cell_of_token,) = ctx.saved_tensors
        return grad.new_zeros(ctx.num_cells, *grad.shape[1:]).index_copy_(0, cell_of_token, grad), None


class _Rotate(torch.autograd.Function):
    """RoPE on [T, heads, head_dim]: rotates (x[i], x[i + rotary_dim/2]) by the token's angle. (Su et al. 2021)

    What lies beyond rotary_dim passes unchanged.
    The gradient is the rotation by the opposite angle, so nothing but the tables is kept.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, sign=1.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = grads
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, sin, sign=-1.0), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, *, sign: float) -> Tensor:
    rotary_dim = 2 * cos.shape[-1]
    first, second = x[..., :rotary_dim].chunk(2, dim=-1)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out_first, out_second = out[..., :rotary_dim].chunk(2, dim=-1)
    torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-sign)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin, value=sign)
    if rotary_dim < x.shape[-1]:
        out[..., rotary_dim:] = x[..., rotary_dim:]
    return out
