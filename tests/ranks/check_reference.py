"""Run by torchrun: a reference policy beside one that is trained, under several layouts."""

import hashlib
import json
import shutil
import sys
import unittest.mock
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from megatron_rl.distributed.device import init_process_group, start_platform

PLATFORM = start_platform("cpu")

from megatron.core import parallel_state  # noqa: E402

from megatron_rl.checkpoint.adam import adam_optimizers, adam_steps  # noqa: E402
from megatron_rl.checkpoint.convert import load_hf, save_hf  # noqa: E402
from megatron_rl.checkpoint.folders import begin_folder, step_folder  # noqa: E402
from megatron_rl.distributed.groups import ParallelConfig, ParallelGroups, build_groups  # noqa: E402
from megatron_rl.model import pipeline  # noqa: E402
from megatron_rl.model.build import ModelConfig, build_model  # noqa: E402
from megatron_rl.model.forward import DeviceBatch, head_logprobs  # noqa: E402
from megatron_rl.model.hf_weights import export_hf  # noqa: E402
from megatron_rl.model.pipeline import run_microbatches, score_tokens  # noqa: E402
from megatron_rl.trainer import reference  # noqa: E402
from megatron_rl.trainer.config import OptimizerConfig  # noqa: E402
from megatron_rl.trainer.optim import PolicyOptimizer  # noqa: E402
from megatron_rl.trainer.reference import ReferencePolicy  # noqa: E402
from megatron_rl.trainer.reference_config import ReferenceConfig  # noqa: E402

TEMPERATURE = 0.7


@dataclass(frozen=True)
class Case:
    """A layout and the model it trains; the folder <model>_other beside it holds other weights."""

    parallel: ParallelConfig
    model: str = "plain"
    dtype: str = "float32"


CASES: dict[str, Case] = {
    "dp2": Case(ParallelConfig()),
    "dp2_bf16": Case(ParallelConfig(), dtype="bfloat16"),
    "tp2_ep2_glm": Case(ParallelConfig(tensor=2, expert=2), "glm"),
    "pp2_tied": Case(ParallelConfig(pipeline=2), "tied"),
}


class Trainer:
    """A policy of the case's model and batches that depend on the step and the data-parallel rank."""

    def __init__(self, root: Path, case: Case, groups: ParallelGroups, folder: Path | None = None) -> None:
        self.folder, self.groups = root / case.model, groups
        config = ModelConfig.model_validate({"path": str(self.folder), "dtype": case.dtype})
        self.model = build_model(config, case.parallel, groups, PLATFORM)
        load_hf(self.model, folder or self.folder, groups)
        self.policy = PolicyOptimizer(self.model, groups, OptimizerConfig(clip_grad=0.5))
        self.norms: list[float] = []

    def reference(self, run_dir: Path, *, step: int = 0, **options: Any) -> ReferencePolicy:
        return ReferencePolicy(
            self.model,
            self.groups,
            platform=PLATFORM,
            config=ReferenceConfig(**options),
            model_path=self.folder,
            run_dir=run_dir,
            step=step,
        )

    def step(self, number: int, between: Callable[[], object] = lambda: None) -> None:
        """One step over two microbatches; between is called when gradients are there and not yet applied."""
        batches = [batch_of(10 * number + 2 * self.groups.dp_rank + i) for i in range(2)]

        def score(hidden: Tensor, index: int) -> tuple[Tensor, None]:
            return -head_logprobs(self.policy.ddp, hidden, batches[index], self.groups).logp.sum() / 160, None

        self.policy.zero_grad()
        run_microbatches(self.policy.ddp, batches, score, self.groups, train=True)
        between()
        self.norms.append(self.policy.step(1e-2, step=number).grad_norm)

    def scores(self) -> list[Tensor]:
        """Of the policy itself."""
        return list(score_tokens(self.model, batch_of(0), self.groups, temperature=TEMPERATURE))

    def state(self) -> list[Any]:
        """All that a step reads or writes: weights and buffers, gradients, moments, gradient norms, random draws."""
        moments = [
            m for part in adam_optimizers(self.policy.optimizer) for m in tensors_of(part.optimizer.state.values())
        ]
        grads = [parameter.main_grad for parameter in self.model.parameters()]  # type: ignore[attr-defined]
        places = [tensor.data_ptr() for tensor in self.model.global_tensors().values()]
        own = [buffer.param_data.data_ptr() for buffer in self.policy.ddp.buffers]  # type: ignore[union-attr]
        assert len(set(own) & set(places)) == len(own), "Megatron's buffers and the parameters share memory"
        return [
            digest(self.model.global_tensors().values()),
            digest(grads),
            digest(moments),
            self.norms,
            digest([torch.get_rng_state()]),
        ]


def tensors_of(states: Iterable[dict[str, Any]]) -> list[Tensor]:
    return [torch.as_tensor(value) for state in states for _, value in sorted(state.items())]


def batch_of(seed: int, lengths: tuple[int, ...] = (13, 27)) -> DeviceBatch:
    generator = torch.Generator().manual_seed(seed)
    ids, targets = (torch.randint(0, 512, (sum(lengths),), generator=generator) for _ in range(2))
    borders = torch.tensor([0, *lengths]).cumsum(0).int()
    return DeviceBatch(ids, targets, borders, lengths)


def digest(tensors: Iterable[Tensor]) -> str:
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def scores_of(policy: ReferencePolicy) -> list[Tensor]:
    return list(policy.score_all([batch_of(0)], temperature=TEMPERATURE)[0])


def same(got: Iterable[Tensor], expected: Iterable[Tensor]) -> bool:
    return all(torch.equal(a, b) and a.dtype == torch.float32 for a, b in zip(got, expected, strict=True))


def beside_training(root: Path, case: Case, groups: ParallelGroups, run_dir: Path) -> dict[str, Any]:
    """Three steps with a reference that scores at every turn, and the same three without one."""
    alone = Trainer(root, case, groups)
    for number in range(3):
        alone.step(number)

    trainer = Trainer(root, case, groups)
    at_start = trainer.scores()
    frozen = trainer.reference(run_dir)
    result = {"at_start": same(scores_of(frozen), at_start)}
    for number in range(3):
        trainer.step(number, lambda: scores_of(frozen))
        result[f"after_step_{number + 1}"] = same(scores_of(frozen), at_start)
    result |= in_one_pass(frozen, groups)
    result["policy_has_moved"] = not same(trainer.scores(), at_start)
    result["training_is_unaffected"] = trainer.state() == alone.state()

    before = trainer.state()
    with unittest.mock.patch.object(reference, "score_all_tokens", side_effect=MemoryError("none left")):
        try:
            scores_of(frozen)
        except MemoryError:
            result["restored_after_an_exception"] = trainer.state() == before
    return result


def in_one_pass(frozen: ReferencePolicy, groups: ParallelGroups) -> dict[str, bool]:
    """Batches of several lengths through one schedule, next to each of them through its own."""
    batches = [batch_of(0), batch_of(1, (5, 9, 2)), batch_of(2, (70,)), batch_of(3)]
    singly = [frozen.score_all([batch], temperature=TEMPERATURE)[0] for batch in batches]
    with (
        unittest.mock.patch.object(pipeline, "run_microbatches", wraps=run_microbatches) as schedule,
        unittest.mock.patch.object(pipeline.dist, "broadcast", wraps=dist.broadcast) as broadcast,
    ):
        together = frozen.score_all(batches, temperature=TEMPERATURE)
    return {
        "in_one_pass": all(same(got, expected) for got, expected in zip(together, singly, strict=True)),
        "filled_once": schedule.call_count == 1 and broadcast.call_count == (groups.pp_size > 1),
        "none_of_none": frozen.score_all([], temperature=TEMPERATURE) == [],
    }


def of_another_folder(root: Path, case: Case, groups: ParallelGroups, run_dir: Path) -> dict[str, Any]:
    """The weights and the expert bias of the folder that the run file names, in a policy that has others."""
    other = root / f"{case.model}_other"
    trainer = Trainer(root, case, groups)
    before, own = trainer.state(), trainer.scores()
    frozen = trainer.reference(run_dir, path=str(other))
    expected = Trainer(root, case, groups, folder=other).scores()
    return {
        "other_weights": same(scores_of(frozen), expected) and not same(own, expected),
        "loading_changes_nothing": trainer.state() == before and same(trainer.scores(), own),
    }


def reset_and_resumed(root: Path, case: Case, groups: ParallelGroups, run_dir: Path) -> dict[str, Any]:
    """The policy becomes the reference after one step, and again after three; then runs resume at several steps."""
    trainer = Trainer(root, case, groups)
    frozen = trainer.reference(run_dir)
    by_step = {0: trainer.scores()}
    for number in range(3):
        trainer.step(number)
        if number != 1:
            by_step[number + 1] = trainer.scores()
            before = trainer.state()
            frozen.reset(number + 1)
            assert trainer.state() == before, "a reset leaves the policy as it is"
    result: dict[str, Any] = {
        "reset_is_the_policy": same(scores_of(frozen), by_step[3]),
        "saved_as_it_is": saved_as_it_is(trainer, frozen.source),
    }
    trainer.step(3)
    result["and_stays_it"] = same(scores_of(frozen), by_step[3]) and not same(trainer.scores(), by_step[3])
    if groups.rank == 0:
        begin_folder(step_folder(run_dir / "reference", 5))  # a reset that was killed
    dist.barrier()
    resumed = Trainer(root, case, groups)
    for step, expected in ((7, 3), (3, 3), (2, 1), (0, 0)):
        found = resumed.reference(run_dir, step=step)
        result[f"resumed_at_{step}"] = same(scores_of(found), by_step[expected])
        dist.barrier()
        left = sorted(path.name for path in (run_dir / "reference").iterdir())
        result[f"folders_at_{step}"] = left
        dist.barrier()
    if groups.rank == 0:
        shutil.rmtree(run_dir)
    return result


def saved_as_it_is(trainer: Trainer, folder: Path) -> bool:
    """The folder's tensors are the policy's, name by name and bit by bit."""
    weights = {name: tensor for name, tensor in export_hf(trainer.model, trainer.groups) if tensor is not None}
    saved = load_file(folder / "model.safetensors") if weights else {}
    assert saved.keys() == weights.keys()
    return all(
        saved[name].dtype == tensor.dtype and torch.equal(saved[name], tensor) for name, tensor in weights.items()
    )


def optimizer_reset(root: Path, case: Case, groups: ParallelGroups, run_dir: Path) -> dict[str, Any]:
    """The step after a reset of the optimizer next to the first step of a new one on the same weights."""
    untouched, trainer = Trainer(root, case, groups), Trainer(root, case, groups)
    trainer.policy.reset_state()
    untouched.step(0)
    trainer.step(0)
    result = {"before_the_first_step": trainer.state() == untouched.state()}
    save_hf(trainer.model, run_dir / "hf", groups, source=trainer.folder)
    new = Trainer(root, case, groups, folder=run_dir / "hf")
    weights = digest(weights_of(trainer))
    trainer.policy.reset_state()
    result["weights_stay"] = weights == digest(weights_of(trainer))
    result["no_step_done"] = adam_steps(trainer.policy.optimizer) == 0
    trainer.step(1)
    new.step(1)
    result["one_step_done"] = adam_steps(trainer.policy.optimizer) == 1
    # A new optimizer of a bfloat16 model starts from rounded master weights, but with the same gradients.
    compared = slice(0, 3) if case.dtype == "float32" else slice(1, 3)
    result["as_a_new_optimizer"] = trainer.state()[compared] == new.state()[compared]
    untouched.step(1)
    result["differs_from_going_on"] = trainer.state()[2] != untouched.state()[2]
    return result


def weights_of(trainer: Trainer) -> list[Tensor]:
    """The model's and the master weights."""
    parts = adam_optimizers(trainer.policy.optimizer)
    masters = [weight for part in parts for group in part.optimizer.param_groups for weight in group["params"]]
    return [*trainer.model.global_tensors().values(), *masters]


def main() -> None:
    root, work = Path(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    init_process_group(PLATFORM)
    results = {}
    for name, case in CASES.items():
        groups = build_groups(case.parallel, PLATFORM, seed=1)
        results[name] = {
            **beside_training(root, case, groups, work / name),
            **of_another_folder(root, case, groups, work / name),
            **reset_and_resumed(root, case, groups, work / name),
            **optimizer_reset(root, case, groups, work / name),
        }
        parallel_state.destroy_model_parallel()
    (work / f"reference{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
