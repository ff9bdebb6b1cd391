"""A policy that the objective does not ask for takes neither memory nor a pass."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_rl.loss.config import KlConfig, LossConfig, ProximalConfig
from megatron_rl.telemetry.values import Rate
from megatron_rl.trainer import frozen_policies
from megatron_rl.trainer.reference_config import ReferenceConfig

LOG: list[str] = []


class Recorded:
    """Stands in for a set of weights and says when it is made."""

    def __init__(self, *_: Any, **__: Any) -> None:
        LOG.append("made")

    def copy_own(self) -> None:
        LOG.append("copied")

    def reset(self, step: int) -> None:
        LOG.append(f"reset {step}")


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> Any:
    LOG.clear()
    monkeypatch.setattr(frozen_policies, "FrozenTensors", Recorded)
    monkeypatch.setattr(frozen_policies, "ReferencePolicy", Recorded)
    return SimpleNamespace(
        model=SimpleNamespace(global_tensors=dict),
        run_dir=Path("run"),
        step=0,
        extra={},
        status=lambda text: None,
        write=lambda metrics: LOG.append(f"wrote {sorted(metrics)}"),
        policy=SimpleNamespace(reset_state=lambda: LOG.append("optimizer")),
    )


def held(base: Any, *, reference: ReferenceConfig | None = None, loss: LossConfig | None = None) -> Any:
    return frozen_policies.FrozenPolicies(
        base,
        reference=reference,
        loss=loss or LossConfig(),
        model_path=Path("model"),
        temperature=1.0,
        platform=SimpleNamespace(device=torch.device("cpu")),  # type: ignore[arg-type]
        groups=SimpleNamespace(),  # type: ignore[arg-type]
    )


def test_an_objective_without_other_policies_holds_and_scores_none(base: Any) -> None:
    policies = held(base)
    batches: Any = [object()]
    assert policies.scored(batches, kl_coef=None) == batches
    policies.after_update()
    policies.after_step(1)
    assert LOG == [] and policies.state() == {}


def test_the_proximal_policy_is_renewed_with_every_update_of_the_engines(base: Any) -> None:
    policies = held(base, loss=LossConfig(proximal=ProximalConfig()))
    assert LOG == ["made"]
    policies.after_update()
    assert LOG == ["made", "copied"]


def test_a_plateau_counts_the_evaluation_before_the_first_step(base: Any) -> None:
    """With trainer.eval_every_steps 1 the next one comes before the rule is asked."""
    policies = held(base, reference=ReferenceConfig(reset_after_plateau=1), loss=LossConfig(kl=KlConfig()))
    for rate in (4, 3):
        policies.after_evaluation({"eval/pass_rate/e/a": Rate(rate, 8)})
    policies.after_step(1)
    assert LOG[1:2] == ["reset 1"]
    policies.after_step(2)
    assert LOG[-1] != "reset 2", "an evaluation counts once"


def test_a_plateau_of_the_mean_pass_rate_resets_reference_and_optimizer_and_survives_a_resume(base: Any) -> None:
    config = ReferenceConfig(reset_after_plateau=2, reset_optimizer=True)
    loss = LossConfig(kl=KlConfig())
    policies = held(base, reference=config, loss=loss)
    rates = [(4, 0), (3, 1), (2, 1)]  # of 8 on two splits: means 1/4, 1/4, 3/16
    for step, (one, other) in enumerate(rates[:2], start=1):
        policies.after_evaluation({"eval/pass_rate/e/a": Rate(one, 8), "eval/pass_rate/e/b": Rate(other, 8)})
        policies.after_step(step)
    assert LOG == ["made"]
    base.extra = policies.state()
    resumed = held(base, reference=config, loss=loss)
    resumed.after_step(3)
    resumed.after_evaluation({"eval/pass_rate/e/a": Rate(2, 8), "eval/pass_rate/e/b": Rate(1, 8)})
    resumed.after_step(4)
    assert LOG[-3:] == ["reset 4", "optimizer", "wrote ['reference/reset_step']"]
