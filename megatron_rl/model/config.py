"""Which model a run trains. Importable without Megatron."""

from typing import Literal

from megatron_rl.config import ConfigModel


class ModelConfig(ConfigModel):
    """A Hugging Face model folder and the precision it is trained in."""

    path: str
    """Folder with config.json, safetensors weights and the tokenizer."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of parameters and activations; bfloat16 keeps float32 master weights in the optimizer."""
