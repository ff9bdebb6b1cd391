"""How weights travel from the trainer to the engines."""

from pydantic import Field

from megatron_rl.config import ConfigModel


class WeightSyncConfig(ConfigModel):
    """The wire and its deadlines."""

    every_steps: int = Field(ge=1, default=1)
    """Optimizer steps between weight updates; above 1 the last rollouts before an update are every_steps - 1 steps
    stale. Evaluations and calibrations update the weights too."""
    ucx_tls: str = Field(min_length=1, default="tcp,sm,self")
    """UCX transports on both sides, never left to UCX, which falls back to TCP in silence. InfiniBand: rc,sm,self."""
    connect_timeout_s: float = Field(gt=0, default=300.0)
    """How long the first publish waits for an engine that is still starting."""
    transfer_timeout_s: float = Field(gt=0, default=120.0)
    """Longest a version's bytes may take to reach every engine."""
