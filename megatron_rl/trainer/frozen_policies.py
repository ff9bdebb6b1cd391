"""The policies a run holds beside the one it trains, and when their weights are renewed.

Invariant: a policy that the objective does not ask for takes neither memory nor a pass.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_rl_kernels import LogprobOut

from megatron_rl.distributed.device import Platform
from megatron_rl.distributed.groups import ParallelGroups
from megatron_rl.loss.config import LossConfig
from megatron_rl.model.forward import DeviceBatch
from megatron_rl.model.pipeline import score_all_tokens
from megatron_rl.model.policy import PolicyModel
from megatron_rl.records import PackedBatch
from megatron_rl.telemetry.values import Last, Value
from megatron_rl.trainer.base import PolicyTrainer
from megatron_rl.trainer.frozen import FrozenTensors
from megatron_rl.trainer.reference import ReferencePolicy
from megatron_rl.trainer.reference_config import ReferenceConfig
from megatron_rl.trainer.reference_resets import ResetRule
from megatron_rl.trainer.scores import FrozenPolicy, with_kl_penalty, with_scores

_STATE = "reference"
"""Name of the reset rule's state in a checkpoint."""


class ProximalPolicy:
    """The trainer's weights as they were at the last weight update: those of the engines, without engine noise."""

    def __init__(self, model: PolicyModel, groups: ParallelGroups) -> None:
        self._model, self._groups = model, groups
        self._weights = FrozenTensors(model.global_tensors().values(), offload=False)

    def renew(self) -> None:
        """The model's weights of now."""
        self._weights.copy_own()

    def score_all(self, batches: Sequence[DeviceBatch], *, temperature: float) -> list[LogprobOut]:
        """(log p of each target, entropy at each position), float32 [T] each, without gradients."""
        with self._weights.standing_in():
            return score_all_tokens(self._model, batches, self._groups, temperature=temperature)


class FrozenPolicies:
    """Reference and proximal policy, each if it is asked for. Collective: every rank runs the same calls."""

    def __init__(
        self,
        base: PolicyTrainer,
        *,
        reference: ReferenceConfig | None,
        loss: LossConfig,
        model_path: Path,
        temperature: float,
        platform: Platform,
        groups: ParallelGroups,
    ) -> None:
        self._base, self._loss, self._config = base, loss, reference
        self._temperature, self._device, self._groups = temperature, platform.device, groups
        self._policies: dict[str, FrozenPolicy] = {}
        self._proximal = ProximalPolicy(base.model, groups) if loss.proximal is not None else None
        if self._proximal is not None:
            self._policies["proximal"] = self._proximal
        if reference is not None:
            self._reference = ReferencePolicy(
                base.model,
                groups,
                platform=platform,
                config=reference,
                model_path=model_path,
                run_dir=base.run_dir,
                step=base.step,
            )
            self._rule = ResetRule(reference)
            self._policies["reference"] = self._reference
            if _STATE in base.extra:
                self._rule.restore(base.extra[_STATE])

    def scored(self, microbatches: Sequence[PackedBatch], *, kl_coef: float | None) -> list[PackedBatch]:
        """This rank's microbatches of a step with what their loss needs of other policies."""
        scored = with_scores(microbatches, self._policies, temperature=self._temperature, device=self._device)
        if self._loss.kl is not None and self._loss.kl.placement == "reward":
            assert kl_coef is not None, "a KL term has a coefficient"
            scored = with_kl_penalty(scored, self._groups, coef=kl_coef)
        return scored

    def after_update(self) -> None:
        """The engines hold the policy's weights of now."""
        if self._proximal is not None:
            self._proximal.renew()

    def after_evaluation(self, metrics: Mapping[str, Value]) -> None:
        """Takes in the policy's mean pass rate over the held-out splits; also that of before the first step."""
        rates = [value.result() for name, value in metrics.items() if name.startswith("eval/pass_rate/")]
        if rates and self._config is not None:
            self._rule.observe(sum(rates) / len(rates))

    def after_step(self, step: int) -> None:
        """Resets the reference if its time has come, before the step's checkpoint is saved."""
        if self._config is None:
            return
        if self._rule.resets_after_step(step):
            self._base.status(f"the policy of step {step} becomes the reference")
            self._reference.reset(step)
            if self._config.reset_optimizer:
                self._base.policy.reset_state()
            self._base.write({"reference/reset_step": Last(step)})

    def state(self) -> dict[str, bytes]:
        """For the checkpoint."""
        return {} if self._config is None else {_STATE: self._rule.state()}
