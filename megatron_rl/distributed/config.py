"""How a model is spread over ranks. Importable without Megatron."""

from typing import Literal

from pydantic import Field

from megatron_rl.config import ConfigModel


class ParallelConfig(ConfigModel):
    """Sizes of the model-parallel groups; what is left of the world is data parallel."""

    tensor: int = Field(ge=1, default=1)
    """Ranks that share every attention and vocabulary matrix; above 1 the sequence is sharded too."""
    expert: int = Field(ge=1, default=1)
    """Ranks that share the experts of each layer; tokens travel to them by all-to-all."""
    expert_tensor: Literal[1] | None = None
    """Ranks that share one expert's matrices. Only 1: experts are never split, whatever tensor is, so with
    tensor=2 and expert=1 both tensor ranks hold all experts and each serves its half of the tokens."""
    pipeline: Literal[1] = 1
    """Pipeline stages. Only 1 so far."""
    context: Literal[1] = 1
    """Ranks that share the tokens of one document. Only 1 so far."""
