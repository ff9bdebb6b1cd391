"""Settings of the measurement that splits the importance ratio into policy movement and engine noise."""

from pydantic import Field, model_validator

from megatron_rl.config import ConfigModel


class SnrConfig(ConfigModel):
    """Calibration: rollouts under the weights that both sides hold, whose log-ratio is engine noise alone."""

    every_steps: int = Field(ge=1, default=20)
    """Steps between calibrations; the first comes before step 1. Noise and bounds drift as training moves."""
    prompts: int = Field(ge=1, default=16)
    """Training prompts that a calibration rolls out once each."""
    window_tokens: int = Field(ge=1, default=200_000)
    """Trained tokens of the latest steps that the calibration is compared with."""
    quantile: float = Field(gt=0.5, lt=1, default=0.995)
    """Derived bounds lie outside this quantile of the noise, and its mirror image on the lower side."""
    ess_floor: float = Field(gt=0, le=1, default=0.8)
    """Derived bounds keep the effective sample size of the clamped weights at this share of the tokens, per bin."""
    min_tokens: int = Field(ge=2, default=400)
    """Tokens that a confidence bin needs for an estimate of its own; with fewer it shares its neighbours'."""

    @model_validator(mode="after")
    def _enough_for_the_quantile(self) -> "SnrConfig":
        needed = 1 / (1 - self.quantile)
        if self.min_tokens < needed - 1e-6:
            raise ValueError(
                f"min_tokens must be at least 1 / (1 - quantile) = {needed:.0f}, got {self.min_tokens}; with fewer the "
                "quantile is the largest value that happened"
            )
        return self
