"""How many prompts a step takes, how groups are redrawn, and what is evaluated."""

from pydantic import Field

from megatron_rl.config import ConfigModel


class EvaluationConfig(ConfigModel):
    """Held-out prompts, one attempt each at the sampling temperature."""

    prompts_per_split: int = Field(ge=1, default=256)
    """Prompts per held-out split of each environment; the same ones every time."""


class OrchestratorConfig(ConfigModel):
    """The loop between environments and trainer."""

    address: str = ""
    """ZeroMQ address the trainer connects to, such as tcp://10.0.0.1:5555; empty: a free loopback port."""
    groups_per_step: int = Field(ge=1, default=16)
    """Admitted groups a step aims at; fewer are trained when redraws run out."""
    max_redraws: int = Field(ge=0, default=2)
    """How often a dropped group is redrawn from its environment before its place stays empty. (SPEC 2)"""
    max_empty_rounds: int = Field(ge=0, default=10)
    """How often a step without any group to learn from is drawn anew, from other prompts, before it is an error."""
    microbatch_tokens: int = Field(ge=16, default=8192)
    """Capacity of one packed microbatch."""
    max_concurrent_rollouts: int = Field(ge=1, default=256)
    """Rollouts in flight at once."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Held-out evaluation."""
