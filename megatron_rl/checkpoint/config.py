"""When training state is saved, and what can be converted. Importable without Megatron."""

from typing import Literal

from pydantic import Field, model_validator

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
    """Checkpoints of these steps and their multiples are kept for ever, a multiple of every_steps; null: only the
    newest ones are kept."""
    asynchronous: bool = False
    """Write while training goes on; costs a copy of weights and optimizer state in host memory."""

    @model_validator(mode="after")
    def _kept_steps_are_saved(self) -> "CheckpointConfig":
        kept, every = self.keep_every_steps, self.every_steps
        if kept is not None and kept % every:
            nearest = max(1, round(kept / every)) * every
            raise ValueError(
                f"keep_every_steps must be a multiple of every_steps, got {kept} with a save every {every} steps; "
                f"{nearest} is the nearest"
            )
        return self
