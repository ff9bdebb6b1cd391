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
    keep_every_steps: int | None = Field(ge=1, default=None)
    """Checkpoints of these steps and their multiples are kept for ever; null: only the newest ones are kept."""
    asynchronous: bool = False
    """Write while training goes on; costs a copy of weights and optimizer state in host memory."""
