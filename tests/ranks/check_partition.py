"""Run by torchrun: the gradient of one RL step of the same documents, cut over ranks and microbatches in many ways."""

import dataclasses
import json
import sys
import unittest.mock
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.distributed.device import init_process_group, start_platform

PLATFORM = start_platform("cpu")

from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import finalize_model_grads  # noqa: E402

from megatron_rl.checkpoint.convert import load_hf  # noqa: E402
from megatron_rl.data.packing import pack_for_ranks, pack_samples  # noqa: E402
from megatron_rl.distributed.groups import ParallelConfig, ParallelGroups, build_groups  # noqa: E402
from megatron_rl.loss.config import LossConfig  # noqa: E402
from megatron_rl.loss.head import rl_loss  # noqa: E402
from megatron_rl.loss.reduce import reduction_weights, trained_mask  # noqa: E402
from megatron_rl.model.build import ModelConfig, build_model  # noqa: E402
from megatron_rl.model.forward import DeviceBatch  # noqa: E402
from megatron_rl.model.hf_weights import export_gradients  # noqa: E402
from megatron_rl.model.pipeline import score_tokens  # noqa: E402
from megatron_rl.records import PackedBatch, Sample  # noqa: E402
from megatron_rl.telemetry.values import reduce_over_ranks  # noqa: E402
from megatron_rl.trainer import optim  # noqa: E402
from megatron_rl.trainer.config import OptimizerConfig  # noqa: E402
from megatron_rl.trainer.guards import LossFunction  # noqa: E402
from megatron_rl.trainer.rl_streams import rl_streams  # noqa: E402
from megatron_rl.trainer.step import train_step  # noqa: E402

TEMPERATURE, LENGTHS = 0.8, (9, 38, 17, 2, 64, 30, 5, 23, 41, 12, 29)
OBJECTIVES: dict[str, LossConfig] = {
    "of_tokens": LossConfig.model_validate(
        {"policy": {"kind": "btv", "eps_low": 3e-4, "eps_high": 3e-4}, "g_max": 0.9, "tau": 0.1}
    ),
    "of_sequences": LossConfig.model_validate(
        {
            "policy": {"kind": "gspo", "eps_low": 0.05, "eps_high": 0.1},
            "kl": {"coef": 0.1, "sequence_exact": True},
            "entropy": {"coef": 0.05, "tokens": "after_observation"},
            "reduction": "sequence_mean",
        }
    ),
    "decoupled": LossConfig.model_validate(
        {
            "policy": {"kind": "cispo", "high": 1.5},
            "proximal": {"guard": {"kind": "clip", "low": 0.8, "high": 1.3}},
            "kl": {"kind": "k2", "coef": 0.1},
            "entropy": {"coef": 0.05},
            "reduction": "fixed_length",
            "fixed_length": 50,
        }
    ),
}
STREAMS = ("logp", "entropy")
LAYOUTS = {
    "dp2": ParallelConfig(),
    "tp2": ParallelConfig(tensor=2),
    "pp2": ParallelConfig(pipeline=2),
    "cp2": ParallelConfig(context=2),
}
"""Tensor parallelism cuts the sequence as well."""


@dataclasses.dataclass(frozen=True)
class Document:
    """A sample and what else is known about its targets."""

    sample: Sample
    distill_mask: np.ndarray
    teacher_logp: np.ndarray


def bare_documents() -> list[Sample]:
    """Prompt, answer, observation, answer: half of the tokens are trained, in pieces."""
    random = np.random.default_rng(5)
    samples = []
    for number, length in enumerate(LENGTHS):
        pieces = np.repeat(random.random(length) < 0.5, random.integers(1, 6, length))[:length]
        pieces[0], pieces[-1] = False, True
        samples.append(Sample(f"d{number}", random.integers(0, 512, length).astype(np.int32), pieces))
    return samples


def documents(policy_logp: Sequence[np.ndarray]) -> list[Document]:
    """Streams near the policy's log-probs of targets; every fifth engine log-prob is missing, every sixth token learns
    from a teacher instead, also some that are missing or masked."""
    random = np.random.default_rng(6)

    def near(logp: np.ndarray, spread: float) -> np.ndarray:
        noisy = np.minimum(logp + spread * random.standard_normal(len(logp)), -1e-3)
        return np.concatenate([[np.nan], noisy]).astype(np.float32)

    found = []
    for sample, logp in zip(bare_documents(), policy_logp, strict=True):
        engine_logp = near(logp, 0.2)
        engine_logp[random.random(len(engine_logp)) < 0.2] = np.nan
        sample.engine_logp = engine_logp
        sample.advantages = np.full(len(engine_logp), random.standard_normal(), dtype=np.float32)
        info = {"reference": near(logp, 0.3), "proximal": near(logp, 0.1)}
        sample.info = {name: stream.tolist() for name, stream in info.items()}
        distill_mask = random.random(len(logp)) < 1 / 6
        found.append(Document(sample, distill_mask, near(logp, 0.5)[1:]))
    return found


class Objective:
    """rl_loss over the documents of a step, with a squared distance to a teacher's log-prob on its tokens."""

    def __init__(self, config: LossConfig, docs: Sequence[Document]) -> None:
        self.config, self.of_id = config, {doc.sample.sample_id: doc for doc in docs}
        counts = [int((_trained(doc.sample)[1:] & ~doc.distill_mask).sum()) for doc in docs]
        weights, self.denominator = reduction_weights(counts, kind=config.reduction, fixed_length=config.fixed_length)
        for doc, weight in zip(docs, weights, strict=True):
            doc.sample.loss_weight = np.full(len(doc.sample.token_ids), weight, dtype=np.float32)

    def __call__(self, out: Any, packed: PackedBatch) -> tuple[Tensor, dict[str, Any]]:
        docs = [self.of_id[name] for name in packed.sample_ids]
        packed.reference_logp, packed.proximal_logp = (
            _joined([np.array(doc.sample.info[name][1:]) for doc in docs], packed, np.nan).astype(np.float32)
            for name in ("reference", "proximal")
        )
        teacher_logp = torch.tensor(_joined([doc.teacher_logp for doc in docs], packed, 0.0))
        distill_mask = torch.tensor(_joined([doc.distill_mask for doc in docs], packed, False))
        streams = dataclasses.replace(
            rl_streams(out, packed, PLATFORM.device),
            distill_mask=distill_mask,
            distill_kl=(out.logp - teacher_logp).square(),
        )
        loss, stats = rl_loss(streams, config=self.config, denominator=self.denominator, distill_coef=0.3)
        return loss, stats.metrics


class OfStream:
    """A sum of one stream of the head with random weights: its gradient alone."""

    def __init__(self, name: str, docs: Sequence[Document]) -> None:
        self.name, random = name, np.random.default_rng(7)
        self.weight = {d.sample.sample_id: random.standard_normal(len(d.distill_mask)).astype(np.float32) for d in docs}

    def __call__(self, out: Any, packed: PackedBatch) -> tuple[Tensor, dict[str, Any]]:
        weights = torch.tensor(_joined([self.weight[name] for name in packed.sample_ids], packed, 0.0))
        return (weights * getattr(out, self.name)).sum() / 100, {}


def _trained(sample: Sample) -> np.ndarray:
    assert sample.engine_logp is not None
    return trained_mask(sample.loss_mask, sample.engine_logp)


def _joined(parts: Sequence[np.ndarray], packed: PackedBatch, on_padding: Any) -> np.ndarray:
    return np.concatenate([*parts, np.full(packed.num_padding, on_padding, dtype=parts[0].dtype if parts else None)])


def microbatches(parts: Sequence[Sequence[Sample]], multiple: int, count: int) -> list[PackedBatch]:
    """One for each part, in its order, then untrained ones up to count."""
    packed = [pack_samples(part, capacity=1000, pad_multiple=multiple)[0] for part in parts]
    _, fillers = pack_for_ranks(parts[0][:1], capacity=1000, data_parallel_size=2, pad_multiple=multiple)
    return packed + fillers * (count - len(packed))


def partitions(docs: Sequence[Document], groups: ParallelGroups) -> dict[str, list[PackedBatch]]:
    """This rank's microbatches by the name of the cut; the first is the same everywhere."""
    samples, rank, multiple = [doc.sample for doc in docs], groups.dp_rank, groups.tp_size
    if groups.dp_size == 1:
        tight = pack_for_ranks(samples, capacity=70, data_parallel_size=1, pad_multiple=multiple)[0]
        return {"one": microbatches([samples], multiple, 1), "packed": tight}
    backwards = samples[::-1]
    _, fillers = pack_for_ranks(samples[:1], capacity=1000, data_parallel_size=2, pad_multiple=4)
    return {
        "one": microbatches([samples], 1, 1) if rank == 0 else fillers,
        "halves": microbatches([samples[:5] if rank == 0 else samples[5:]], 1, 1),
        "alone": microbatches([[sample] for sample in samples[rank::2]], 1, 6),
        "backwards": microbatches([backwards[rank:6:2], backwards[6 + rank :: 2]], 16, 2),
        "packed": pack_for_ranks(samples, capacity=70, data_parallel_size=2)[rank],
    }


class Trainer:
    """A policy that takes no step."""

    def __init__(self, folder: Path, parallel: ParallelConfig, groups: ParallelGroups) -> None:
        self.groups = groups
        self.model = build_model(ModelConfig(path=str(folder)), parallel, groups, PLATFORM)
        load_hf(self.model, folder, groups)
        self.policy = optim.PolicyOptimizer(self.model, groups, OptimizerConfig())

    def logp(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        """Of each document's targets, the same on every rank."""
        packed = pack_samples(samples, capacity=1000)[0]
        logp = score_tokens(self.model, DeviceBatch.from_packed(packed, PLATFORM.device), self.groups).logp.contiguous()
        dist.broadcast(logp, src=0)
        return np.split(logp.numpy(), packed.cu_seqlens[1:-1])

    def step(self, batches: Sequence[PackedBatch], loss: LossFunction) -> dict[str, Any]:
        """Summed gradients by HF name (rank 0), their norm and the metrics, where a step would be applied."""
        grads: dict[str, Tensor] = {}

        def admit(_step: int, _norm: float) -> bool:
            whole = export_gradients(self.model, self.groups)
            grads.update({name: grad.clone() for name, grad in whole if grad is not None})
            return False

        with (
            unittest.mock.patch.object(self.policy.guard, "admit", admit),
            # Whole sums on every rank, where the distributed optimizer would be content with its shards.
            unittest.mock.patch.object(
                optim, "finalize_model_grads", partial(finalize_model_grads, force_all_reduce=True)
            ),
        ):
            grad_norm, metrics = train_step(
                self.policy,
                batches,
                loss,
                self.groups,
                step=0,
                lr=1e-3,
                device=PLATFORM.device,
                temperature=TEMPERATURE,
            )
        reduced = reduce_over_ranks(metrics, self._gather)
        values = {name: value.result() for name, value in reduced.items() if not name.startswith("perf/")}
        return {"grads": grads, "grad_norm": grad_norm, "metrics": values}

    def _gather(self, metrics: dict[str, Any]) -> list[dict[str, Any]]:
        gathered: list[Any] = [None] * self.groups.dp_size
        dist.all_gather_object(gathered, metrics, group=self.groups.dp_group)
        return gathered


def difference(got: Mapping[str, Any], expected: Mapping[str, Any]) -> dict[str, Any]:
    """Relative, of the whole gradient and of its worst tensor."""
    assert got["grads"].keys() == expected["grads"].keys()
    norms = {name: float(grad.double().norm()) for name, grad in expected["grads"].items()}
    errors = {name: float((got["grads"][name] - grad).double().norm()) for name, grad in expected["grads"].items()}
    total = np.linalg.norm(list(norms.values()))
    return {
        "whole": float(np.linalg.norm(list(errors.values())) / total),
        "worst_tensor": max(errors[name] / norms[name] for name in norms),
        "grad_norm": got["grad_norm"] / float(total) - 1,
        "metrics": got["metrics"],
    }


def losses(docs: Sequence[Document]) -> Iterator[tuple[str, LossFunction]]:
    """Each to be used up before the next is made: an objective writes its reduction's weights into the samples."""
    for name, config in OBJECTIVES.items():
        yield name, Objective(config, docs)
    for name in STREAMS:
        yield name, OfStream(name, docs)


def main() -> None:
    folder, work = Path(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    init_process_group(PLATFORM)
    docs: list[Document] = []
    expected: dict[str, dict[str, Any]] = {}
    results: dict[str, Any] = {}
    for layout, parallel in LAYOUTS.items():
        groups = build_groups(parallel, PLATFORM, seed=1)
        trainer = Trainer(folder, parallel, groups)
        docs = docs or documents(trainer.logp(bare_documents()))
        for name, loss in losses(docs):
            for cut, batches in partitions(docs, groups).items():
                got = trainer.step(batches, loss)
                expected.setdefault(name, got)
                if groups.rank == 0:
                    results[f"{name}/{layout}/{cut}"] = difference(got, expected[name])
        parallel_state.destroy_model_parallel()
    if dist.get_rank() == 0:
        (work / "partition.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
