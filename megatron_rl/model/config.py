"""Which model a run trains. Importable without Megatron."""

from typing import Literal

from megatron_rl.config import ConfigModel

Recompute = Literal["none", "selective", "full"]


class ModelConfig(ConfigModel):
    """A Hugging Face model folder and the precision it is trained in."""

    path: str
    """Folder with config.json, safetensors weights and the tokenizer."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of parameters and activations; bfloat16 keeps float32 master weights in the optimizer."""
    recompute: Recompute = "none"
    """Activations that the backward pass computes again instead of keeping: none; selective: those of the MoE layers,
    on the CPU of attention's core too; full: all but the input of every layer. The numbers stay the same."""
