"""When the policy becomes the reference, and which of those that it became a resumed run may need. No Megatron.

Invariant: RUN/reference/step_N is the policy after N steps, whole. A run at step S has as its reference the one with
the largest N <= S, and where there is none the folder that the run file names.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_rl.checkpoint.folders import (
    checkpoint_step,
    checkpoints,
    remove_leftovers,
    remove_step,
    step_folders,
)
from megatron_rl.trainer.reference_config import ReferenceConfig


@dataclass
class _Plateau:
    """Evaluations since the last reset."""

    best: float | None = None
    """Highest pass rate, that of the reset included."""
    latest: float | None = None
    waited: int = 0
    """Evaluations since the best one."""

    def observe(self, pass_rate: float) -> None:
        if not math.isfinite(pass_rate):
            raise ValueError(f"a pass rate must be finite, got {pass_rate}; evaluate at least one prompt")
        self.latest = pass_rate
        if self.best is None or pass_rate > self.best:
            self.best, self.waited = pass_rate, 0
        else:
            self.waited += 1

    def restart(self) -> None:
        self.best, self.waited = self.latest, 0


class ResetRule:
    """Decides after each step; its state goes with the run's checkpoints."""

    def __init__(self, config: ReferenceConfig) -> None:
        self._every, self._patience = config.reset_every_steps, config.reset_after_plateau
        self._plateau = _Plateau()

    def observe(self, pass_rate: float) -> None:
        """What the policy of now reached on held-out prompts. ValueError unless finite."""
        self._plateau.observe(pass_rate)

    def resets_after_step(self, step: int) -> bool:
        """Whether the policy after `step` optimizer steps becomes the reference; to be asked once for every step, after
        its evaluation if there is one."""
        due = self._every is not None and step > 0 and step % self._every == 0
        due |= self._patience is not None and self._plateau.waited >= self._patience
        if due:
            self._plateau.restart()
        return due

    def state(self) -> bytes:
        """What restore takes."""
        return json.dumps(asdict(self._plateau)).encode()

    def restore(self, state: bytes) -> None:
        """Goes on where state() was called."""
        self._plateau = _Plateau(**json.loads(state))


def reference_folder(run_dir: Path) -> Path:
    """RUN/reference"""
    return run_dir / "reference"


def newest_reference(run_dir: Path, *, step: int) -> Path | None:
    """The reference of a run at this step; None: the one that the run file names."""
    found = [path for path in step_folders(reference_folder(run_dir)) if checkpoint_step(path) <= step]
    return found[-1] if found else None


def remove_later_references(run_dir: Path, *, step: int) -> None:
    """Removes what a run that goes on from this step never came to, and what a killed writer has left."""
    remove_leftovers(reference_folder(run_dir))
    for path in step_folders(reference_folder(run_dir)):
        if checkpoint_step(path) > step:
            remove_step(path)


def remove_unneeded_references(run_dir: Path) -> None:
    """Removes the references that no complete checkpoint and none that is still to be saved can need."""
    saved = [checkpoint_step(path) for path in checkpoints(run_dir / "checkpoints")]
    paths = {checkpoint_step(path): path for path in step_folders(reference_folder(run_dir))}
    for step in paths.keys() - needed_references(paths, saved):
        remove_step(paths[step])


def needed_references(references: Iterable[int], saved: Iterable[int]) -> set[int]:
    """Of the steps of references, those that a run may resume with; saved: the steps of complete checkpoints.

    Those after the newest checkpoint all stay: a save under way in the background may be of any later step.
    """
    references, saved = set(references), set(saved)
    newest = max(saved, default=0)
    after = {step for step in references if step > newest}
    before = ({r for r in references if r <= step} for step in saved)
    return after | {max(steps) for steps in before if steps}
