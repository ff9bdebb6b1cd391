"""Values of the wrong kind in a config.json: one error that names the key, before anything else is read."""

import json
import runpy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.config import ConfigError
from megatron_rl.model.families import family_for
from megatron_rl.model.families.values import KINDS

UNIT = Path(__file__).parent
AIR: dict[str, Any] = runpy.run_path(str(UNIT / "test_model_families_glm4.py"))["AIR"]
QWEN: dict[str, Any] = runpy.run_path(str(UNIT / "test_model_families.py"))["RELEASED"]
sft = runpy.run_path(str(UNIT.parent / "cli_input.py"))["sft"]

SIZE, COUNT, FLAG = "a whole number above 0", "a whole number of 0 or more", "true or false"
POSITIVE, DECIMAL, OBJECT = "a number above 0", "a number above 0 with a decimal point", "an object"
SHARE, LAYERS = "a number above 0 and at most 1", "a list of layer numbers"
NAN = float("nan")
WRONG: list[tuple[str, str, list[Any]]] = [
    ("num_hidden_layers", SIZE, ["4", 4.0, 0, -1, True, []]),
    ("head_dim", SIZE, ["32", 0, 32.0]),
    ("first_k_dense_replace", COUNT, [None, "1", -1, 1.0, True]),
    ("num_nextn_predict_layers", COUNT, ["x", -1]),
    ("n_group", SIZE, [None, "1", 0]),
    ("topk_group", SIZE, [None, {}]),
    ("rms_norm_eps", DECIMAL, [None, "tiny", -1.0, 0.0, 1, NAN, float("inf")]),
    ("routed_scaling_factor", DECIMAL, [None, "a", 0.0, 1, True]),
    ("rope_theta", POSITIVE, ["abc", -5, 0, 10**400, NAN, True]),
    ("partial_rotary_factor", SHARE, ["0.5", 0, 1.5]),
    ("attention_dropout", "a number", [None, "a", False]),
    ("use_qk_norm", FLAG, ["no", None, 1]),
    ("norm_topk_prob", FLAG, ["false", None]),
    ("tie_word_embeddings", FLAG, ["false", None, 0]),
    ("attention_bias", FLAG, ["true", None]),
    ("use_sliding_window", FLAG, ["false", None]),
    ("decoder_sparse_step", SIZE, ["1", None]),
    ("mlp_only_layers", LAYERS, ["abc", 5, ["0"], {}]),
    ("rope_parameters", OBJECT, ["default", []]),
    ("rope_scaling", OBJECT, ["default", [], 1]),
    ("rope_parameters.rope_theta", POSITIVE, ["abc", -5]),
    ("rope_parameters.partial_rotary_factor", SHARE, ["a", 2]),
    ("rope_parameters.rope_type", "a text", [[], 0]),
    ("rope_scaling.type", "a text", [False]),
    ("dtype", "a text", [["float32"], 16]),
    ("architectures", "a list of names", ["Qwen3MoeForCausalLM", 5, [["x"]], {"a": 1}]),
]
CASES = [(key, said, value) for key, said, values in WRONG for value in values]


def with_value(config: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    outer, _, inner = key.partition(".")
    return {**config, outer: {inner: value} if inner else value}


@pytest.mark.parametrize("released", [AIR, QWEN], ids=["glm4", "qwen3"])
@pytest.mark.parametrize(("key", "said", "value"), CASES)
def test_a_value_of_the_wrong_kind_is_named_with_its_cure(
    key: str, said: str, value: Any, released: dict[str, Any]
) -> None:
    config = with_value(released, key, value)
    with pytest.raises(ConfigError) as error:
        family_for(config).check(config)
    message = f"config.json: {key} must be {said}, got {json.dumps(value)}; restore the original model's file"
    assert str(error.value) == message


@pytest.mark.parametrize("released", [AIR, QWEN], ids=["glm4", "qwen3"])
@pytest.mark.parametrize("key", sorted(KINDS))
@pytest.mark.parametrize("value", [None, "x", "1", 0, -1, 1.5, True, [], {}, [{}], {"rope_theta": []}, NAN])
def test_a_config_is_refused_in_words_or_described_whole(released: dict[str, Any], key: str, value: Any) -> None:
    config, family = {**released, "num_hidden_layers": 2, key: value}, family_for(released)
    try:
        family.check(config)
    except ConfigError:
        return
    family.transformer_kwargs(config)
    family.model_kwargs(config)
    assert not family.is_redundant(config, "model.embed_tokens.weight")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("first_k_dense_replace", None),
        ("head_dim", "32"),
        ("rms_norm_eps", "tiny"),
        ("rope_parameters", "default"),
        ("norm_topk_prob", "false"),
        ("tie_word_embeddings", "false"),
    ],
)
@pytest.mark.parametrize("dry", [["--dry-run"], []], ids=["dry run", "run"])
def test_it_is_found_before_the_tokenizer_is_read(
    key: str, value: Any, dry: list[str], tiny: Path, tmp_path: Path, error_of: Callable[..., str]
) -> None:
    """transformers would refuse some of them while it loads the tokenizer, with another cure."""
    model = tmp_path / "model"
    shutil.copytree(tiny / "model", model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, key: value}))
    error = error_of("sft", sft(tiny, tmp_path), f"model.path={model}", *dry)
    assert error.startswith(f"error: config.json: {key} must be ") and f"got {json.dumps(value)}; restore" in error
