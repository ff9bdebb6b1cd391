"""The values of a config.json: what each key that a family reads must hold, proven before anything uses it."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_rl.config import ConfigError
from megatron_rl.model.families.family import HfConfig


@dataclass(frozen=True)
class Kind:
    """What a value must be, in words and as a test."""

    said: str
    holds: Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    """One that a float holds: neither a boolean nor JSON's NaN and Infinity."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


_SIZE = Kind("a whole number above 0", lambda value: type(value) is int and value > 0)
_COUNT = Kind("a whole number of 0 or more", lambda value: type(value) is int and value >= 0)
_NUMBER = Kind("a number", _is_number)
_POSITIVE = Kind("a number above 0", lambda value: _is_number(value) and value > 0)
_DECIMAL = Kind("a number above 0 with a decimal point", lambda value: type(value) is float and _POSITIVE.holds(value))
"""transformers refuses a whole number for some settings."""
_SHARE = Kind("a number above 0 and at most 1", lambda value: _is_number(value) and 0 < value <= 1)
_FLAG = Kind("true or false", lambda value: type(value) is bool)
_TEXT = Kind("a text", lambda value: isinstance(value, str))
_OBJECT = Kind("an object", lambda value: isinstance(value, dict))
_LAYERS = Kind("a list of layer numbers", lambda value: isinstance(value, list) and all(map(_COUNT.holds, value)))

_SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "vocab_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "moe_intermediate_size",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "num_experts_per_tok",
)
_ROPE: dict[str, Kind] = {"rope_theta": _POSITIVE, "partial_rotary_factor": _SHARE}
_ROPE_OBJECTS = ("rope_parameters", "rope_scaling")
_ROPE_TYPES = ("rope_type", "type")
KINDS: dict[str, Kind] = {
    **dict.fromkeys(
        (*_SIZES, "intermediate_size", "decoder_sparse_step", "n_group", "topk_group", "n_shared_experts"), _SIZE
    ),
    **dict.fromkeys(("first_k_dense_replace", "num_nextn_predict_layers"), _COUNT),
    **dict.fromkeys(("rms_norm_eps", "routed_scaling_factor"), _DECIMAL),
    **dict.fromkeys(("use_qk_norm", "norm_topk_prob", "tie_word_embeddings"), _FLAG),
    **dict.fromkeys(("attention_bias", "use_sliding_window"), _FLAG),
    **dict.fromkeys(_ROPE_OBJECTS, _OBJECT),
    **dict.fromkeys(("dtype", "torch_dtype"), _TEXT),
    **_ROPE,
    "attention_dropout": _NUMBER,
    "mlp_only_layers": _LAYERS,
}
_OPTIONAL = {*_SIZES, *_ROPE_OBJECTS, *_ROPE, "num_nextn_predict_layers", "mlp_only_layers", "dtype", "torch_dtype"}
"""null is the same as leaving these out; transformers refuses it for the others, and so does this project."""


def check_values(hf_config: HfConfig) -> None:
    """ConfigError for the first key whose value is of another kind, whether or not it is read in the end."""
    for name in KINDS:
        setting(hf_config, name)
    for name in _ROPE_OBJECTS:
        inside: dict[str, Any] = setting(hf_config, name, {})
        for inner, kind in {**_ROPE, **dict.fromkeys(_ROPE_TYPES, _TEXT)}.items():
            if inside.get(inner) is not None:
                _check(f"{name}.{inner}", inside[inner], kind)


def setting(hf_config: HfConfig, name: str, default: Any = None) -> Any:
    """The value of a key of KINDS; default where config.json leaves it out. ConfigError for another kind of value."""
    value = hf_config.get(name)
    if name not in hf_config or (value is None and name in _OPTIONAL):
        return default
    _check(name, value, KINDS[name])
    return value


def need(hf_config: HfConfig, *names: str) -> int:
    """The first of names that is set, a size: the same setting under its older and newer name."""
    for name in names:
        if (value := setting(hf_config, name)) is not None:
            return value
    raise ConfigError(f"config.json must set {' or '.join(names)}; restore the original model's file")


def rope_setting(hf_config: HfConfig, name: str, default: float) -> float:
    """transformers 5 writes rope_parameters, earlier versions wrote rope_theta and its like beside rope_scaling."""
    value = setting(hf_config, "rope_parameters", {}).get(name)
    if value is None:
        return float(setting(hf_config, name, default))
    _check(f"rope_parameters.{name}", value, _ROPE[name])
    return float(value)


def rope_type(hf_config: HfConfig) -> str:
    """Of the newer spelling or the older two; default where none says it."""
    inside = [setting(hf_config, name, {}) for name in _ROPE_OBJECTS]
    said = (values.get(name) for values in inside for name in _ROPE_TYPES)
    return next((kind for kind in said if kind), "default")


def _check(name: str, value: Any, kind: Kind) -> None:
    if not kind.holds(value):
        raise ConfigError(
            f"config.json: {name} must be {kind.said}, got {json.dumps(value)}; restore the original model's file"
        )
