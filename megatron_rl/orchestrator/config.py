"""How many prompts a step takes, how groups are redrawn, and what is evaluated."""

from pydantic import Field, model_validator

from megatron_rl.config import ConfigModel


class EvaluationConfig(ConfigModel):
    """Held-out prompts, each attempted a few times."""

    prompts_per_split: int = Field(ge=1, default=256)
    """Prompts per held-out split of each environment; the same ones every time."""
    attempts_per_prompt: int = Field(ge=1, default=1)
    """Attempts at each prompt; from 2 on, distinct answers are counted. The 95% interval of a rate takes prompts, not
    attempts, as independent."""
    pass_at: list[int] = Field(min_length=1, default=[1])
    """Each k of the pass@k to report, without bias. 1 is eval/pass_rate, which is always there."""
    temperature: float | None = Field(ge=0.01, default=None)
    """Sampling temperature of evaluations; null: rollout.temperature."""

    @model_validator(mode="after")
    def _enough_attempts(self) -> "EvaluationConfig":
        for k in self.pass_at:
            if not 1 <= k <= self.attempts_per_prompt:
                raise ValueError(
                    f"pass_at must lie between 1 and attempts_per_prompt, got {k} with {self.attempts_per_prompt} "
                    f"attempts; {'set attempts_per_prompt to at least ' + str(k) if k > 1 else 'remove it'}"
                )
        if len(set(self.pass_at)) < len(self.pass_at):
            raise ValueError(f"pass_at must name each k once, got {self.pass_at}; remove the repeated one")
        return self


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
