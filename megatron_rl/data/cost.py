"""What a packed sequence costs: attention grows with the square of each document's length, the rest with its tokens."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_rl.config import ConfigError

Lengths = Sequence[int] | np.ndarray
HfConfig = Mapping[str, Any]

_FULL, _WINDOW = "full_attention", "sliding_attention"
_LINEAR = ("linear_attention", "conv", "mamba", "recurrent")
"""Kinds of layers in config.json's layer_types whose work grows with the tokens alone."""


def attention_cost(lengths: Lengths, *, window: int | None = None) -> int:
    """Sum of squared document lengths, as causal attention within each document costs.

    With a window, the positions that one sees, itself among them, a longer document of n tokens costs
    window (2 n - window): its pairs of positions in the same unit. ValueError for a window below 1.
    """
    return int(document_costs(lengths, window=window).sum())


def document_costs(lengths: Lengths, *, window: int | None = None) -> np.ndarray:
    """attention_cost of each document. int64 [documents]"""
    tokens = np.asarray(lengths, dtype=np.int64)
    if window is None:
        return tokens * tokens
    if window < 1:
        raise ValueError(f"window must be at least 1 position, got {window}")
    seen = np.minimum(tokens, window)
    return seen * (2 * tokens - seen)


@dataclass(frozen=True)
class CostModel:
    """Cost of documents as a sum over layers. The default is full attention alone: the sum of squared lengths."""

    full: float = 1.0
    """Per squared token, of all layers with full attention."""
    windows: tuple[tuple[int, float], ...] = ()
    """(window, the same for the layers that have this window)"""
    per_token: float = 0.0
    """Of everything that grows with the tokens: projections, feed-forward parts, head."""

    @classmethod
    def from_hf_config(cls, hf_config: HfConfig) -> "CostModel":
        """Matrix-product FLOPs of one forward pass, from config.json: full attention, sliding windows, hybrid stacks.

        layer_types says which layer has which; without it sliding_window does, as transformers reads it. Of experts
        those that a token takes count. ConfigError for a kind of layer whose cost is unknown, or a missing size.
        """
        layers = _attention_layers(hf_config)
        inner = _size(hf_config, "num_attention_heads") * _head_dim(hf_config)
        # Two products of inner multiply-adds for each of the n^2 / 2 pairs of positions.
        of_layer = 2.0 * inner
        counts = Counter(window for window in layers if window)
        return cls(
            full=of_layer * sum(window is None for window in layers),
            windows=tuple((window, of_layer * count) for window, count in sorted(counts.items())),
            per_token=2.0 * _weights_per_token(hf_config, len(layers)),
        )

    def cost(self, lengths: Lengths) -> float:
        """Of one packed sequence of these documents."""
        return float(self.of_documents(lengths).sum())

    def of_documents(self, lengths: Lengths) -> np.ndarray:
        """Of each document. float64 [documents]"""
        tokens = np.asarray(lengths, dtype=np.int64)
        costs = self.per_token * tokens + self.full * document_costs(tokens)
        for window, factor in self.windows:
            costs = costs + factor * document_costs(tokens, window=window)
        return costs

    def even_length(self) -> int | None:
        """Length from which on a document's attention costs more than all the rest; None if it never does."""
        attention = CostModel(self.full, self.windows)
        low, high = 0, 1
        while attention.cost([high]) <= self.per_token * high:
            low, high = high, 2 * high
            if high > _NEVER:
                return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if attention.cost([middle]) > self.per_token * middle else (middle, high)
        return high


_NEVER = 2**30
"""Tokens that no document has; squared they still fit into an int64."""


def _attention_layers(hf_config: HfConfig) -> list[int | None]:
    """Of each layer: None for full attention, its window, or 0 for one that is linear in the tokens."""
    num_layers = _size(hf_config, "num_hidden_layers")
    window = hf_config.get("sliding_window")
    kinds = hf_config.get("layer_types")
    if kinds is None:
        if not window or not hf_config.get("use_sliding_window", True):
            return [None] * num_layers
        # Where transformers has this option, the layers below it have full attention.
        first = hf_config.get("max_window_layers", 0) if "use_sliding_window" in hf_config else 0
        kinds = [_FULL if layer < first else _WINDOW for layer in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise ConfigError(
            f"config.json: layer_types must have one kind for each of {num_layers} layers, got {_shown(kinds)}; "
            "restore the original model's file"
        )
    of_kind: dict[str, int | None] = {_FULL: None, **dict.fromkeys(_LINEAR, 0)}
    if _WINDOW in kinds:
        of_kind[_WINDOW] = _size(hf_config, "sliding_window")
    unknown = next((kind for kind in kinds if kind not in of_kind), None)
    if unknown is not None:
        raise ConfigError(
            f"config.json: the cost of a layer is known for the layer_types {', '.join([_FULL, _WINDOW, *_LINEAR])}, "
            f"got {_shown(unknown)}; let attention alone be the cost"
        )
    return [of_kind[kind] for kind in kinds]


def _weights_per_token(hf_config: HfConfig, num_layers: int) -> float:
    """Weights that a token is multiplied with: those of the experts it takes, the head, not the embedding."""
    hidden, heads = _size(hf_config, "hidden_size"), _size(hf_config, "num_attention_heads")
    kv_heads = _size(hf_config, "num_key_value_heads", default=heads)
    projections = hidden * _head_dim(hf_config) * (2 * heads + 2 * kv_heads)
    num_experts = _size(hf_config, "num_experts", "num_local_experts", "n_routed_experts", default=0)
    num_dense = sum(_is_dense(hf_config, layer) for layer in range(num_layers)) if num_experts else num_layers
    weights = num_layers * projections + hidden * _size(hf_config, "vocab_size")
    if num_dense:
        weights += num_dense * 3 * hidden * _size(hf_config, "intermediate_size")
    if num_experts:
        expert = _size(hf_config, "moe_intermediate_size", "intermediate_size")
        shared = _size(hf_config, "shared_expert_intermediate_size", default=0)
        shared = shared or expert * _size(hf_config, "n_shared_experts", default=0)
        taken = _size(hf_config, "num_experts_per_tok") * expert + shared
        weights += (num_layers - num_dense) * hidden * (3 * taken + num_experts)
    return float(weights)


def _is_dense(hf_config: HfConfig, layer: int) -> bool:
    """Whether a layer of a mixture-of-experts model has no experts."""
    return (
        layer < _size(hf_config, "first_k_dense_replace", default=0)
        or layer in (hf_config.get("mlp_only_layers") or [])
        or (layer + 1) % _size(hf_config, "decoder_sparse_step", default=1) != 0
    )


def _head_dim(hf_config: HfConfig) -> int:
    heads = _size(hf_config, "num_attention_heads")
    return _size(hf_config, "head_dim", default=_size(hf_config, "hidden_size") // heads)


def _size(hf_config: HfConfig, *names: str, default: int | None = None) -> int:
    """The first of names that is set; ConfigError unless it is a whole number of 0 or more, or none is set."""
    found = next(((name, hf_config[name]) for name in names if hf_config.get(name) is not None), None)
    if found is None:
        if default is None:
            raise ConfigError(f"config.json must set {' or '.join(names)}; restore the original model's file")
        return default
    name, value = found
    if type(value) is not int or value < 0 or (value == 0 and default is None):
        least = "above 0" if default is None else "of 0 or more"
        raise ConfigError(
            f"config.json: {name} must be a whole number {least}, got {_shown(value)}; "
            "restore the original model's file"
        )
    return value


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."
