"""Settings of the policy losses, each with its own; trust_region.py has the losses."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from megatron_rl.config import ConfigModel


class BtvConfig(ConfigModel):
    """Binary total variation: a token is masked once its probability moved by more than eps. (DPPO 2026, Kolibri)"""

    kind: Literal["btv"] = "btv"
    """-k A r with a mask k on the change of probability."""
    eps_low: float = Field(ge=0, le=1, default=0.2)
    """A token with A <= 0 is masked once its probability fell by more than this since it was sampled."""
    eps_high: float = Field(ge=0, le=1, default=0.2)
    """A token with A > 0 is masked once its probability rose by more than this since it was sampled."""
    sided: Literal["sign", "symmetric"] = "sign"
    """sign: the advantage's sign chooses the bound. symmetric: every token must stay inside both."""


class DppoKlConfig(ConfigModel):
    """Binary KL: a token is masked once it moved on too far, in KL of token or not token. (DPPO 2026)"""

    kind: Literal["dppo_kl"] = "dppo_kl"
    """-k A r with a mask k on the binary KL."""
    delta: float = Field(ge=0, default=0.05)
    """Largest binary KL, in nats, from the sampler's probability of the token to the policy's."""


class PpoClipConfig(ConfigModel):
    """Clipped ratio, the upper side wider, with a cap for A < 0. (PPO 2017, DAPO 2025, dual clip 2020)"""

    kind: Literal["ppo_clip"] = "ppo_clip"
    """-A r, the ratio clipped on the side that A pushes it to."""
    eps_low: float = Field(ge=0, le=1, default=0.2)
    """A token with A <= 0 stops once r < 1 - eps_low."""
    eps_high: float = Field(ge=0, default=0.28)
    """A token with A > 0 stops once r > 1 + eps_high."""
    dual_clip: float | None = Field(gt=1, default=3.0)
    """A token with A <= 0 stops once r > dual_clip, where a single push could be of any size; null: never."""


class CispoConfig(ConfigModel):
    """Clamped, constant ratio times log p: no token is masked. (MiniMax-M1 2025, ScaleRL 2025)"""

    kind: Literal["cispo"] = "cispo"
    """-A times the clamped ratio, held constant, times log p."""
    low: float = Field(ge=0, le=1, default=0.0)
    """Smallest weight of a token; above 0 a token with A < 0 is pushed down however unlikely it has become."""
    high: float = Field(ge=1, default=4.0)
    """Largest weight of a token."""


class GspoConfig(ConfigModel):
    """One ratio per sequence, its tokens' geometric mean, clipped as in PPO. (GSPO 2025, token form)"""

    kind: Literal["gspo"] = "gspo"
    """-A s, s the sequence's ratio."""
    eps_low: float = Field(ge=0, le=1, default=3e-4)
    """A sequence with A <= 0 stops once s < 1 - eps_low."""
    eps_high: float = Field(ge=0, default=4e-4)
    """A sequence with A > 0 stops once s > 1 + eps_high."""


class TisConfig(ConfigModel):
    """Capped, constant ratio times log p. (Truncated importance sampling, Flash-RL 2025)"""

    kind: Literal["tis"] = "tis"
    """-A times min(r, cap), held constant, times log p."""
    cap: float = Field(ge=1, default=2.0)
    """Largest weight of a token."""


class RejectConfig(ConfigModel):
    """Tokens outside a band of the ratio are dropped; they are mostly those where the policy decides. (IcePop 2025)"""

    kind: Literal["reject"] = "reject"
    """-k A r with a mask k on the ratio."""
    low: float = Field(ge=0, le=1, default=0.5)
    """A token with r below this is dropped."""
    high: float = Field(ge=1, default=5.0)
    """A token with r above this is dropped."""


class NoTrustRegionConfig(ConfigModel):
    """Plain importance sampling: no token is masked, clipped or capped."""

    kind: Literal["none"] = "none"
    """-A r."""


def _default_btv(value: Any) -> Any:
    """A mapping without a kind is of the default kind."""
    return {"kind": "btv", **value} if isinstance(value, dict) else value


PolicyConfig = Annotated[
    Annotated[
        BtvConfig
        | DppoKlConfig
        | PpoClipConfig
        | CispoConfig
        | GspoConfig
        | TisConfig
        | RejectConfig
        | NoTrustRegionConfig,
        Field(discriminator="kind"),
    ],
    BeforeValidator(_default_btv),
]
