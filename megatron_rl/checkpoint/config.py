"""When training state is saved, and what can be converted. Importable without Megatron."""

from typing import Literal

from pydantic import Field

from megatron_rl.config import ConfigModel

Direction = Literal["to_megatron", "to_hf"]
"""Of a conversion: a Hugging Face folder to a Megatron checkpoint folder, or the way back."""


class CheckpointConfig(ConfigModel):
    """Training state under RUN/checkpoints."""

    every_steps: int = Field(ge=1, default=20)
    """Steps between two saves; the last step is always saved."""
    keep_last: int = Field(ge=1, default=2)
    """Newest checkpoints kept; older ones are removed after a save has succeeded."""
