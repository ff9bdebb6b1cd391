"""Where each HF tensor of a Decoder lives in Megatron's parameters, with Transformer Engine's layers and with ours."""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from megatron_rl.model.families.decoder import Decoder
from megatron_rl.model.families.family import WeightPart

Part = Callable[[Tensor], Tensor]


def weight_parts(decoder: Decoder) -> list[WeightPart]:
    """Every HF tensor of the model, sorted by name."""
    vocabulary = (decoder.vocab, decoder.hidden)
    head, embedding = "output_layer.weight", "embedding.word_embeddings.weight"
    parts = [
        WeightPart(
            "model.embed_tokens.weight", vocabulary, (embedding,), "rows", copy_on_last=head if decoder.tied else None
        ),
        WeightPart("model.norm.weight", (decoder.hidden,), ("decoder.final_layernorm.weight",), layer="last"),
    ]
    if not decoder.tied:
        parts.append(WeightPart("lm_head.weight", vocabulary, (head,), "rows", layer="last"))
    for layer in range(decoder.num_layers):
        parts += _attention(layer, decoder)
        parts += _mlp(layer, "", decoder.dense_hidden, decoder) if layer < decoder.num_dense_layers else []
        parts += _mixture(layer, decoder) if layer >= decoder.num_dense_layers else []
    return sorted(parts, key=lambda part: part.name)


def _attention(layer: int, decoder: Decoder) -> list[WeightPart]:
    """Norms and projections of one layer."""
    hf, mcore, hidden = f"model.layers.{layer}", f"decoder.layers.{layer}", decoder.hidden
    attention, own = f"{hf}.self_attn", f"{mcore}.self_attention"
    fused_norms = f"{own}.linear_qkv.layer_norm_weight", f"{mcore}.mlp.linear_fc1.layer_norm_weight"
    norms = [
        (f"{hf}.input_layernorm", hidden, (f"{mcore}.input_layernorm.weight", fused_norms[0])),
        (f"{hf}.post_attention_layernorm", hidden, (f"{mcore}.pre_mlp_layernorm.weight", fused_norms[1])),
    ]
    if decoder.qk_norm:
        norms += [(f"{attention}.{x}_norm", decoder.head_dim, (f"{own}.{x}_layernorm.weight",)) for x in "qk"]
    parts = [WeightPart(f"{name}.weight", (size,), params, layer=layer) for name, size, params in norms]
    rows = {"q": decoder.heads * decoder.head_dim} | dict.fromkeys("kv", decoder.kv_heads * decoder.head_dim)
    for which, num_rows in rows.items():
        name, part = f"{attention}.{which}_proj", _qkv_part(which, decoder)
        fused = f"{own}.linear_qkv"
        parts.append(WeightPart(f"{name}.weight", (num_rows, hidden), (f"{fused}.weight",), "rows", part, layer=layer))
        if decoder.qkv_bias:
            parts.append(WeightPart(f"{name}.bias", (num_rows,), (f"{fused}.bias",), "rows", part, layer=layer))
    output = f"{attention}.o_proj.weight", (hidden, rows["q"]), (f"{own}.linear_proj.weight",)
    return [*parts, WeightPart(*output, "columns", layer=layer)]


def _qkv_part(which: str, decoder: Decoder) -> Part:
    """q, k or v rows of a fused qkv shard. Megatron stores, per kv head: its query heads, then k, then v."""
    queries = decoder.heads // decoder.kv_heads
    begin, count = {"q": (0, queries), "k": (queries, 1), "v": (queries + 1, 1)}[which]

    def part(fused: Tensor) -> Tensor:
        by_kv_head = fused.view(-1, queries + 2, decoder.head_dim, *fused.shape[1:])
        return by_kv_head[:, begin : begin + count]

    return part


def _mixture(layer: int, decoder: Decoder) -> list[WeightPart]:
    """Router, shared expert and experts of one layer."""
    hf, mcore = f"model.layers.{layer}.mlp", f"decoder.layers.{layer}.mlp"
    num_experts = decoder.num_experts
    router = f"{mcore}.router"
    parts = [WeightPart(f"{hf}.gate.weight", (num_experts, decoder.hidden), (f"{router}.weight",), layer=layer)]
    if decoder.expert_bias:
        name, param = f"{hf}.gate.e_score_correction_bias", f"{router}.expert_bias"
        parts.append(WeightPart(name, (num_experts,), (param,), layer=layer, dtype="float32"))
    if decoder.shared_hidden:
        parts += _mlp(layer, ".shared_experts", decoder.shared_hidden, decoder)
    for expert in range(num_experts):
        parts += _mlp(layer, ".experts", decoder.expert_hidden, decoder, expert=expert)
    return parts


def _mlp(layer: int, inside: str, inner: int, decoder: Decoder, *, expert: int | None = None) -> list[WeightPart]:
    """Gate, up and down of a SwiGLU; Megatron has gate above up in one matrix."""
    hf, mcore = f"model.layers.{layer}.mlp{inside}", f"decoder.layers.{layer}.mlp{inside}"
    if expert is not None:
        hf = f"{hf}.{expert}"
    suffix = ".weight" if expert is None else ""
    hidden = decoder.hidden

    def half(index: int) -> Part:
        return lambda gate_up: gate_up.view(2, -1, hidden)[index]

    fc1, fc2 = (f"{mcore}.linear_fc1{suffix}",), (f"{mcore}.linear_fc2{suffix}",)
    part = partial(WeightPart, layer=layer, expert=expert)
    return [
        part(f"{hf}.gate_proj.weight", (inner, hidden), fc1, "rows", half(0)),
        part(f"{hf}.up_proj.weight", (inner, hidden), fc1, "rows", half(1)),
        part(f"{hf}.down_proj.weight", (hidden, inner), fc2, "columns"),
    ]
