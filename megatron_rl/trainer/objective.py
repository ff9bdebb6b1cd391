"""What of the objective changes while a run goes on, as one value that a checkpoint holds."""

import math
from collections.abc import Mapping

import msgspec

from megatron_rl.config import ConfigError
from megatron_rl.loss.config import LossConfig
from megatron_rl.loss.kl import AdaptiveKL
from megatron_rl.loss.snr import NoiseTable
from megatron_rl.telemetry.values import Last, Value


class _State(msgspec.Struct):
    kl_coef: float | None
    noise: NoiseTable | None
    kl_start: float | None = None
    """loss.kl.coef that an adaptive kl_coef started from."""


def check_resumed_objective(config: LossConfig, state: bytes) -> None:
    """ConfigError if config starts an adaptive coefficient elsewhere than the run did; state: of its checkpoint."""
    saved = msgspec.msgpack.decode(state, type=_State)
    if config.kl is None or config.kl.target is None or saved.kl_start in (None, config.kl.coef):
        return
    raise ConfigError(
        f"loss.kl.coef is where a coefficient with loss.kl.target starts and has no effect on a run that goes on, got "
        f"{config.kl.coef:g} where it started from {saved.kl_start:g} and is {saved.kl_coef:g} now; set it back, or "
        "loss.kl.target=null to fix it"
    )


class RunningObjective:
    """The KL coefficient, which may adapt, and the noise table of the last calibration."""

    def __init__(self, config: LossConfig, state: bytes | None) -> None:
        """state: state() of the checkpoint the run goes on from. A coefficient that does not adapt is the config's.

        ConfigError: as check_resumed_objective.
        """
        if state:
            check_resumed_objective(config, state)
        saved = msgspec.msgpack.decode(state, type=_State) if state else _State(None, None)
        self.noise = saved.noise
        """None before the first calibration."""
        self._kl = config.kl
        self._adaptive: AdaptiveKL | None = None
        if config.kl is not None and config.kl.target is not None:
            self._kl_start = config.kl.coef
            self._adaptive = AdaptiveKL(config.kl.target, saved.kl_coef or config.kl.coef)

    @property
    def kl_coef(self) -> float | None:
        """Of the next step; None without a KL term."""
        if self._adaptive is not None:
            return self._adaptive.coef
        return None if self._kl is None else self._kl.coef

    def after_step(self, metrics: Mapping[str, Value]) -> dict[str, Value]:
        """Takes in a step's metrics, equal on all ranks; returns the coefficient that the step used as a metric."""
        used: dict[str, Value] = {} if self.kl_coef is None else {"kl/coef": Last(self.kl_coef)}
        if self._adaptive is not None:
            kl = metrics["kl/reference_k3"].result()
            if math.isfinite(kl):  # a step without tokens measures none
                self._adaptive.update(kl)
        return used

    def state(self) -> bytes:
        """For the checkpoint."""
        coef, start = (self._adaptive.coef, self._kl_start) if self._adaptive is not None else (None, None)
        return msgspec.msgpack.encode(_State(coef, self.noise, start))
