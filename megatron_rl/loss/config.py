"""Settings of the RL objective."""

from typing import Literal

from pydantic import Field

from megatron_rl.config import ConfigModel


class LossConfig(ConfigModel):
    """The objective: B-TV mask, bound on each token's gradient, squared log-ratio."""

    eps_low: float = Field(ge=0, default=0.2)
    """A token with A <= 0 is masked once its probability fell by more than this since it was sampled."""
    eps_high: float = Field(ge=0, default=0.2)
    """A token with A > 0 is masked once its probability rose by more than this since it was sampled."""
    sided: Literal["sign", "symmetric"] = "sign"
    """sign: the advantage's sign chooses the bound. symmetric: every token must stay inside both."""
    g_max: float | None = Field(gt=0, default=2.0)
    """Largest entry of a token's logit gradient, in units of |A|; null: no bound."""
    tau: float = Field(ge=0, default=1e-3)
    """Weight of the squared log-ratio; its push 2 tau log r is not bounded (metric regulariser/max_weight)."""
    regulariser_tokens: Literal["all", "kept"] = "all"
    """all: every trained token. kept: only those that the mask lets through."""
