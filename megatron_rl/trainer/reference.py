"""The reference policy: a second set of weights in the place of the policy's own, for as long as it scores."""

from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist
from megatron_rl_kernels import LogprobOut

from megatron_rl.checkpoint.convert import load_hf, save_hf
from megatron_rl.checkpoint.folders import step_folder
from megatron_rl.distributed.device import Platform
from megatron_rl.distributed.groups import ParallelGroups
from megatron_rl.model.forward import DeviceBatch
from megatron_rl.model.pipeline import score_all_tokens
from megatron_rl.model.policy import PolicyModel
from megatron_rl.trainer.frozen import FrozenTensors
from megatron_rl.trainer.reference_config import ReferenceConfig, check_offload
from megatron_rl.trainer.reference_resets import (
    newest_reference,
    reference_folder,
    remove_later_references,
    remove_unneeded_references,
)


class ReferencePolicy:
    """Frozen weights of the policy's kind. Collective: every rank runs the same calls.

    It takes the memory of this rank's parameters and persistent buffers once more, and has neither gradients nor
    optimizer state.
    """

    source: Path
    """The Hugging Face folder that holds the same weights."""

    def __init__(
        self,
        model: PolicyModel,
        groups: ParallelGroups,
        *,
        platform: Platform,
        config: ReferenceConfig,
        model_path: Path,
        run_dir: Path,
        step: int,
    ) -> None:
        """The reference that a run at this step has; model, which may hold any weights, is left as it is.

        References of later steps, which the run has not come to, are removed. DataError where the weights do not fit.
        """
        check_offload(config, platform.kind)
        self._model, self._groups = model, groups
        self._model_path, self._run_dir = Path(model_path), Path(run_dir)
        self._weights = FrozenTensors(model.global_tensors().values(), offload=config.offload)
        self.source = _agreed_source(self._run_dir, step, start=Path(config.path or model_path))
        with self._weights.standing_in(fill=True):
            load_hf(model, self.source, groups)

    def score_all(self, batches: Sequence[DeviceBatch], *, temperature: float) -> list[LogprobOut]:
        """(log p of each target, entropy at each position) by the reference for each batch, float32 [T] each.

        Without gradients. Offloaded weights travel once for all batches.
        """
        with self._weights.standing_in():
            return score_all_tokens(self._model, batches, self._groups, temperature=temperature)

    def reset(self, step: int) -> None:
        """The policy as it is now, after `step` optimizer steps, becomes the reference, RUN/reference/step_N.

        To be called before the checkpoint of that step is saved: a run that is killed in between goes on from an
        earlier step and removes it. Rank 0 writes. RunError where the disk does not take it.
        """
        folder = step_folder(reference_folder(self._run_dir), step)
        save_hf(self._model, folder, self._groups, source=self._model_path)
        self._weights.copy_own()
        self.source = folder
        if self._groups.rank == 0:
            remove_unneeded_references(self._run_dir)


def _agreed_source(run_dir: Path, step: int, *, start: Path) -> Path:
    """What rank 0 finds: a shared file system may show another rank an older listing."""
    found = [start]
    if dist.get_rank() == 0:
        remove_later_references(run_dir, step=step)
        found = [newest_reference(run_dir, step=step) or start]
    dist.broadcast_object_list(found, src=0)
    return found[0]
