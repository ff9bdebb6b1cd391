"""One file per Hugging Face architecture: what it needs of Megatron and where each HF tensor lives."""

import json
from typing import Any

from megatron_rl.config import ConfigError
from megatron_rl.model.families.family import Family, WeightPart
from megatron_rl.model.families.glm4_moe import GLM4_MOE
from megatron_rl.model.families.qwen3_moe import QWEN3_MOE

__all__ = ["FAMILIES", "Family", "WeightPart", "family_for"]

FAMILIES = {family.architecture: family for family in (GLM4_MOE, QWEN3_MOE)}


def family_for(hf_config: dict[str, Any]) -> Family:
    """The family of a config.json; ConfigError lists the supported architectures."""
    architectures = hf_config.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise ConfigError(
            f"config.json: architectures must be a list of names, got {json.dumps(architectures)}; "
            "restore the original model's file"
        )
    for architecture in architectures:
        if architecture in FAMILIES:
            return FAMILIES[architecture]
    raise ConfigError(
        f"the model's architecture must be one of {sorted(FAMILIES)}, got {architectures or 'none'} in config.json; "
        "choose a supported model"
    )
