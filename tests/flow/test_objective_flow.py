"""Every policy loss, guard and regulariser in a real run whose rollouts are made to be stale."""

import math
import os
import runpy
import signal
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_rl.engine.server import free_port

RL = runpy.run_path(str(Path(__file__).with_name("test_rl_flow.py")))
Command = runpy.run_path(str(Path(__file__).with_name("conftest.py")))["Command"]
STEPS = 4

RANKS_2 = "run.processes=2"
OBJECTIVES: dict[str, list[str]] = {
    "btv": [
        "loss.policy={eps_low: 0.01, eps_high: 0.01}",
        "loss.g_max=0.5",
        "loss.entropy={coef: 0.01, tokens: after_observation}",
    ],
    "btv-symmetric": [
        "loss.policy.sided=symmetric",
        "loss.kl.coef=0.1",
        "trainer.reference={}",
        RANKS_2,
        "parallel.tensor=2",
    ],
    "dppo_kl": [
        "loss.policy.kind=dppo_kl",
        "loss.guard.kind=clamp",
        "loss.kl.placement=reward",
        "trainer.reference={}",
        RANKS_2,
    ],
    "ppo_clip": [
        "loss.policy.kind=ppo_clip",
        "loss.reduction=sequence_mean",
        "loss.kl.kind=k3",
        "trainer.reference={}",
    ],
    "cispo": [
        "loss.policy.kind=cispo",
        "loss.kl={kind: k2, sequence_exact: true}",
        "trainer.reference={reset_every_steps: 2, reset_optimizer: true}",
        "loss.reduction=fixed_length",
        "loss.fixed_length=24",
        RANKS_2,
        "parallel.pipeline=2",
    ],
    "gspo": ["loss.policy.kind=gspo", "loss.kl={kind: k1, target: 0.01}", "trainer.reference={}"],
    "tis": ["loss.policy.kind=tis", "loss.kl={kind: k1+}", "trainer.reference={}", "trainer.snr=null"],
    "reject": [
        "loss.policy.kind=reject",
        "loss.kl={kind: k2+}",
        "trainer.reference={reset_after_plateau: 1}",
        "trainer.eval_every_steps=2",
    ],
    "none": ["loss.policy.kind=none", "loss.guard.kind=derived", "trainer.snr.every_steps=2", "loss.entropy.coef=0.01"],
    "none-shrink": ["loss.policy.kind=none", "loss.g_max=null", "loss.guard.kind=shrink", "trainer.snr.every_steps=2"],
    "none-reject": ["loss.policy.kind=none", "loss.guard.kind=reject", "loss.regulariser_tokens=kept"],
    "none-clip": ["loss.policy.kind=none", "loss.guard.kind=clip", "loss.tau=0"],
    "decoupled": [
        "loss.guard.kind=tis",
        "loss.proximal={guard: {kind: derived}}",
        "trainer.snr.every_steps=2",
        RANKS_2,
        "parallel.context=2",
    ],
    "decoupled-ppo": [
        "loss.policy.kind=ppo_clip",
        "loss.proximal={guard: {kind: clamp}}",
        "rollout.injected_noise=0.2",
    ],
}
"""Overrides of each run; the rest is rl_config."""

MEASURED = {
    "btv": ["entropy/bonus"],
    "btv-symmetric": ["kl/loss", "kl/reference_k3", "kl/coef"],
    "dppo_kl": ["kl/reference_k3", "guard/share"],
    "cispo": ["kl/loss", "kl/reference_k3"],
    "gspo": ["kl/coef"],
    "decoupled": ["ratio/engine_mean", "log_ratio/movement_abs_mean", "log_ratio/engine_abs_mean"],
}
"""Metrics that a run must have in every step besides those of all."""


@pytest.fixture(scope="module")
def engine_url(sft_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real engine that all runs use one after the other."""
    folder = tmp_path_factory.mktemp("engine")
    url = f"http://127.0.0.1:{free_port()}"
    config = RL["rl_config"](sft_run / "hf", folder)
    engine = Command(["engine", str(config), f"engine.urls=[{url}]"], folder / "output.txt")

    def answers() -> bool:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=2) as reply:
                return reply.status == 200
        except OSError:
            return False

    try:
        engine.wait_for(answers, 240)
        yield url
    finally:
        os.killpg(engine.process.pid, signal.SIGTERM)
        engine.process.wait(60)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_stale_run_reaches_its_last_step_with_finite_metrics(
    name: str, sft_run: Path, engine_url: str, tmp_path: Path, command: Callable
) -> None:
    config = RL["rl_config"](sft_run / "hf", tmp_path)
    run = command(
        "rl",
        str(config),
        f"engine.urls=[{engine_url}]",
        f"trainer.steps={STEPS}",
        "trainer.eval_every_steps=4",
        "trainer.optimizer.lr=0.001",
        "weight_sync.every_steps=3",
        *OBJECTIVES[name],
    )
    assert run.wait(300) == 0, run.text()
    steps = [record for record in RL["records"](tmp_path / "run") if "loss/total" in record]
    assert [record["step"] for record in steps] == [1, 2, 3, 4]
    for record in steps:
        for metric in ("loss/total", "loss/policy", "ratio/mean", "grad_norm", "entropy"):
            assert record[metric] is not None and math.isfinite(record[metric]), (metric, record)
    assert max(record["log_ratio/abs_max"] for record in steps[1:3]) > 0.01, "stale rollouts, so ratios move"
    assert "loss = sum over trained tokens" in run.text(), "the objective is printed"
    if name == "btv":
        stale = steps[1:3]
        assert max(record["mask/share"] for record in stale) > 0, stale
        assert max(record["gradient_scale/share_scaled"] for record in stale) > 0, stale
    for metric in MEASURED.get(name, ()):
        assert all(math.isfinite(record[metric]) for record in steps), metric
