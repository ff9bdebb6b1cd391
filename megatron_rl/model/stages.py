"""Which layers each pipeline stage holds. Importable without Megatron."""

from typing import TYPE_CHECKING

from megatron_rl.config import ConfigError

if TYPE_CHECKING:
    from megatron_rl.model.families.family import WeightPart


def stage_layers(num_layers: int, num_stages: int) -> list[range]:
    """Layers of each stage, spread evenly; the earliest stages take one more each of what is left over.

    ConfigError when a stage would stay empty.
    """
    if num_stages > num_layers:
        raise ConfigError(
            f"parallel.pipeline must leave no stage empty, got {num_stages} stages for {num_layers} layers; "
            f"choose at most {num_layers}"
        )
    base, left = divmod(num_layers, num_stages)
    stages, first = [], 0
    for stage in range(num_stages):
        count = base + (stage < left)
        stages.append(range(first, first + count))
        first += count
    return stages


def stage_of(part: "WeightPart", num_layers: int, num_stages: int) -> int:
    """The stage that holds the part; for a tied head, the one with the embedding."""
    if part.layer == "first":
        return 0
    if part.layer == "last":
        return num_stages - 1
    return next(i for i, layers in enumerate(stage_layers(num_layers, num_stages)) if part.layer in layers)
