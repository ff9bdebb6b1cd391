"""What is compared: the settings of the study, and which of them are drawn together."""

from dataclasses import dataclass, field
from typing import Any

NOISE = 1.0
"""Standard deviation of the injected noise on logits: a token of probability .3 is reported off by .7 nats."""


@dataclass(frozen=True)
class Setting:
    """One row of the table."""

    label: str
    changes: dict[str, Any] = field(default_factory=dict)
    """Config keys on top of config.yaml."""


def _kl(kind: str, coef: float, placement: str = "loss") -> dict[str, Any]:
    return {"loss.kl": {"kind": kind, "coef": coef, "placement": placement}}


def _noise(guard: dict[str, Any]) -> dict[str, Any]:
    return {"rollout.injected_noise": NOISE, "loss.guard": guard}


SETTINGS = {
    "none": Setting("no regulariser"),
    "k3plus_0.05": Setting("KL k3+, 0.05", _kl("k3+", 0.05)),
    "k3plus_0.3": Setting("KL k3+, 0.3", _kl("k3+", 0.3)),
    "k3plus_1": Setting("KL k3+, 1.0", _kl("k3+", 1.0)),
    "k3_0.3": Setting("KL k3, 0.3", _kl("k3", 0.3)),
    "reward_0.3": Setting("KL in the reward, 0.3", _kl("k1", 0.3, "reward")),
    "entropy_0.03": Setting("entropy bonus, 0.03", {"loss.entropy": {"coef": 0.03}}),
    "temperature_1.3": Setting("temperature 1.3", {"rollout.temperature": 1.3}),
    "noise_off": Setting("engine noise, no guard", _noise({"kind": "off"})),
    "noise_reject": Setting("engine noise, reject", _noise({"kind": "reject", "low": 0.5, "high": 2.0})),
    "noise_clamp": Setting("engine noise, clamp", _noise({"kind": "clamp", "low": 0.5, "high": 2.0})),
}

COLUMNS = {
    "KL to the start": ("none", "k3plus_0.05", "k3plus_0.3", "k3plus_1"),
    "Other regularisers": ("none", "k3_0.3", "reward_0.3", "entropy_0.03", "temperature_1.3"),
    "Engine noise": ("none", "noise_off", "noise_reject", "noise_clamp"),
}
"""Columns of the figure: title and settings."""
