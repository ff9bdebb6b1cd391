"""Settings of the RL objective: policy loss, guards on ratios, regularisers, reduction."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from megatron_rl.config import ConfigModel
from megatron_rl.loss.policy_config import BtvConfig, PolicyConfig


class OffGuardConfig(ConfigModel):
    """The ratio as it is."""

    kind: Literal["off"] = "off"
    """No guard."""


class TisGuardConfig(ConfigModel):
    """min(ratio, high)."""

    kind: Literal["tis"] = "tis"
    """Caps the ratio."""
    high: float = Field(ge=1, default=2.0)
    """Largest weight."""


class _BandConfig(ConfigModel):
    low: float = Field(ge=0, le=1, default=0.5)
    """Lower end of the band of ratios."""
    high: float = Field(ge=1, default=2.0)
    """Upper end of the band of ratios."""


class ClipGuardConfig(_BandConfig):
    """A token outside the band keeps its value there and loses its push."""

    kind: Literal["clip"] = "clip"
    """Clips the ratio."""


class RejectGuardConfig(_BandConfig):
    """A token outside the band is dropped; those are mostly the tokens where the policy decides."""

    kind: Literal["reject"] = "reject"
    """Drops tokens by their ratio."""


class ClampGuardConfig(_BandConfig):
    """A token outside the band keeps its push, weighted as at the band's end."""

    kind: Literal["clamp"] = "clamp"
    """Clamps the ratio."""


class ShrinkGuardConfig(ConfigModel):
    """ratio^lambda, lambda = SNR / (1 + SNR) of the token's confidence bin, from the last calibration."""

    kind: Literal["shrink"] = "shrink"
    """Shrinks the log-ratio by its measured noise."""


class DerivedGuardConfig(ConfigModel):
    """Clamps to the bounds derived for the token's confidence bin at the last calibration."""

    kind: Literal["derived"] = "derived"
    """Clamps the ratio to measured bounds."""


def _off_is_a_name(value: Any) -> Any:
    """YAML reads a bare `off` as false."""
    return {**value, "kind": "off"} if isinstance(value, dict) and value.get("kind") is False else value


GuardConfig = Annotated[
    Annotated[
        OffGuardConfig
        | TisGuardConfig
        | ClipGuardConfig
        | RejectGuardConfig
        | ClampGuardConfig
        | ShrinkGuardConfig
        | DerivedGuardConfig,
        Field(discriminator="kind"),
    ],
    BeforeValidator(_off_is_a_name),
]


class ProximalConfig(ConfigModel):
    """Decoupled form: the trust region holds policy / proximal, the policy of the last weight update; the constant
    ratio proximal / engine, which is engine noise, multiplies the result under its own guard."""

    guard: GuardConfig = OffGuardConfig()
    """Guard on proximal / engine."""


class KlConfig(ConfigModel):
    """KL(policy || reference) on the trained tokens."""

    kind: Literal["k1", "k2", "k3", "k1+", "k2+", "k3+"] = "k3+"
    """Estimator per token. As a loss k1 pushes nowhere on average, k2 and every + form descend KL(policy || reference),
    k3 descends KL(reference || policy); k1 and k3 measure without bias. k1 where the placement is reward."""
    coef: float = Field(gt=0, default=1e-3)
    """Weight; the starting one if target is set."""
    placement: Literal["loss", "reward"] = "loss"
    """loss: per token beside the policy loss. reward: the sum of k1 over a rollout is taken off its reward, before the
    advantages."""
    sequence_exact: bool = False
    """In the loss: each token also answers for the KL of the tokens after it, which makes the gradient that of the
    KL of whole sequences. Only for kinds with the gradient of k2."""
    target: float | None = Field(gt=0, default=None)
    """KL per token, in nats, that an adaptive coefficient steers to; null: the coefficient is fixed."""

    @model_validator(mode="before")
    @classmethod
    def _kind_of_the_reward(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("placement") == "reward":
            return {"kind": "k1", **data}
        return data

    @model_validator(mode="after")
    def _no_option_without_effect(self) -> "KlConfig":
        if self.placement == "reward" and self.kind != "k1":
            raise ValueError(
                f"kind must be k1 with placement reward, which has no gradient of its own, got {self.kind}; remove it"
            )
        if self.placement == "reward" and self.sequence_exact:
            raise ValueError(
                "sequence_exact has no effect with placement reward, whose gradient is that of the whole sequence; "
                "remove it"
            )
        if self.sequence_exact and self.kind in ("k1", "k3"):
            raise ValueError(
                f"sequence_exact needs a kind with the gradient of k2 (k2, k1+, k2+, k3+), got {self.kind}; "
                "k3+ is the default"
            )
        return self


class EntropyConfig(ConfigModel):
    """Bonus on the entropy of the whole next-token distribution; it pulls towards the uniform one."""

    coef: float = Field(gt=0)
    """Weight per nat."""
    tokens: Literal["all", "after_observation"] = "all"
    """all: every trained token. after_observation: the first one after each observation inside a rollout."""


_GUARDS_THEMSELVES = ("ppo_clip", "cispo", "gspo", "tis", "reject")
_PUSH_EVERY_TOKEN = ("cispo", "tis", "none")
_GUARDS_THAT_STOP = ("clip", "reject")


class LossConfig(ConfigModel):
    """The objective: policy loss, bound on each token's gradient, regularisers, reduction."""

    policy: PolicyConfig = BtvConfig()
    """Policy loss and its trust region."""
    g_max: float | None = Field(gt=0, default=2.0)
    """Largest entry of a token's gradient on logits / rollout.temperature, in units of |A|, whatever the policy loss:
    g_max / rollout.temperature on the model's own logits. null: no bound."""
    guard: GuardConfig = OffGuardConfig()
    """Guard on the ratio that the policy loss sees: policy / engine, with proximal policy / proximal. Only for policy
    losses that do not guard the ratio themselves: btv, dppo_kl, none."""
    proximal: ProximalConfig | None = None
    """Decoupled form; null: the policy loss sees policy / engine."""
    tau: float = Field(ge=0, default=1e-3)
    """Weight of the squared log-ratio; its push 2 tau log r is not bounded (metric regulariser/max_weight)."""
    regulariser_tokens: Literal["all", "kept"] = "all"
    """all: every trained token. kept: only those that the policy loss pushes."""
    kl: KlConfig | None = None
    """KL to the reference policy; null: no such term."""
    entropy: EntropyConfig | None = None
    """Entropy bonus; null: entropy is only measured."""
    reduction: Literal["token_mean", "sequence_mean", "fixed_length"] = "token_mean"
    """How tokens add up over a step. token_mean: each counts the same. sequence_mean: each rollout counts the same.
    fixed_length: sums divided by the number of rollouts times fixed_length."""
    fixed_length: int | None = Field(ge=1, default=None)
    """Length in tokens by which fixed_length divides; rollout.max_new_tokens is a common choice."""

    @model_validator(mode="after")
    def _options_fit(self) -> "LossConfig":
        if self.guard.kind != "off" and self.policy.kind in _GUARDS_THEMSELVES:
            raise ValueError(
                f"guard has no effect of its own with policy.kind {self.policy.kind}, which guards the same ratio, got "
                f"{self.guard.kind}; remove one of the two"
            )
        guards = [self.guard.kind, *([self.proximal.guard.kind] if self.proximal else [])]
        stops = self.policy.kind not in _PUSH_EVERY_TOKEN or any(kind in _GUARDS_THAT_STOP for kind in guards)
        if self.regulariser_tokens == "kept" and not stops:
            raise ValueError(
                f"regulariser_tokens kept has no effect with policy.kind {self.policy.kind}, which pushes every token; "
                "remove it"
            )
        if (self.reduction == "fixed_length") != (self.fixed_length is not None):
            raise ValueError(
                f"fixed_length must be set for reduction fixed_length and only there, got {self.fixed_length} for "
                f"{self.reduction}; rollout.max_new_tokens is a common choice"
            )
        return self
