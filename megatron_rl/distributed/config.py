"""How a model is spread over ranks. Importable without Megatron."""

from pydantic import Field

from megatron_rl.config import ConfigError, ConfigModel


class ParallelConfig(ConfigModel):
    """Sizes of the model-parallel groups; what is left of the world is data parallel."""

    tensor: int = Field(ge=1, default=1)
    """Ranks that share every attention and vocabulary matrix; above 1 the sequence is sharded too."""
    expert: int = Field(ge=1, default=1)
    """Ranks that share the experts of each layer; tokens travel to them by all-to-all."""
    expert_tensor: int = Field(ge=1, default=1)
    """Ranks that share the matrices of one expert, whatever tensor is. With tensor=2, expert=1 and expert_tensor=1 both
    tensor ranks hold every expert whole and each serves its half of the tokens."""
    pipeline: int = Field(ge=1, default=1)
    """Pipeline stages; the layers are spread as evenly as they can be, earlier stages taking what is left over."""
    context: int = Field(ge=1, default=1)
    """Ranks that share the tokens of every document; documents are padded to a multiple of twice this."""

    @property
    def model_ranks(self) -> int:
        """Ranks that hold one copy of the non-expert weights."""
        return self.tensor * self.pipeline


def check_world(config: ParallelConfig, world_size: int) -> None:
    """ConfigError when so many ranks do not divide into the layout."""
    dense = config.tensor * config.context * config.pipeline
    expert = config.expert * config.expert_tensor * config.pipeline
    for product, names, sizes in (
        (dense, "tensor * context * pipeline", f"{config.tensor} * {config.context} * {config.pipeline}"),
        (expert, "expert * expert_tensor * pipeline", f"{config.expert} * {config.expert_tensor} * {config.pipeline}"),
    ):
        if world_size % product:
            raise ConfigError(
                f"the number of ranks must be a multiple of parallel's {names}, got {world_size} ranks for {sizes}; "
                "change the number of ranks (run.processes) or these sizes"
            )
