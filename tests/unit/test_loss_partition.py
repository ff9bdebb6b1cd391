"""The gradient of a whole step does not depend on how its documents are split over ranks, microbatches and packs."""

import math
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_rl.loss.config import LossConfig
from megatron_rl.loss.guard import NoiseTable
from megatron_rl.loss.head import LossStats, RlStreams, rl_loss
from megatron_rl.loss.reduce import reduction_weights
from megatron_rl.loss.trust_region import POLICY_LOSSES
from megatron_rl.telemetry.values import Value, merge_metrics

NOISE = NoiseTable(shrink=(0.5,) * 7, lower=(-0.3,) * 7, upper=(0.4,) * 7)
EVERYTHING: dict[str, Any] = {
    "kl": {"kind": "k3+", "coef": 0.3, "sequence_exact": True},
    "entropy": {"coef": 0.2, "tokens": "after_observation"},
    "proximal": {"guard": {"kind": "derived"}},
    "tau": 0.1,
}
CASES: dict[str, dict[str, Any]] = {
    **{kind: {"policy": {"kind": kind}} for kind in POLICY_LOSSES},
    **{f"{kind}-everything": {"policy": {"kind": kind}, **EVERYTHING} for kind in ("btv", "gspo", "cispo")},
    "btv-guard": {"guard": {"kind": "reject"}, "regulariser_tokens": "kept"},
    "btv-shrink": {"guard": {"kind": "shrink"}, "kl": {"kind": "k3", "coef": 0.3}, "entropy": {"coef": 0.2}},
}


def config_of(case: str, reduction: str = "token_mean") -> LossConfig:
    length = 7 if reduction == "fixed_length" else None
    return LossConfig.model_validate({**CASES[case], "reduction": reduction, "fixed_length": length})


@dataclass
class Step:
    """Documents of one step; each stream is a list of [n] tensors, one per document. Leaves require a gradient."""

    streams: list[dict[str, Tensor]]
    leaves: list[Tensor]
    denominator: float


LEAVES = ("policy_logp", "entropy", "distill_kl")


def make_step(lengths: list[int], seed: int, config: LossConfig) -> Step:
    """Every kind of token: masked by the trust region, off-policy, untrained, distilled, without engine log-prob."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(n: int, low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(n, generator=generator, dtype=torch.float64)

    streams = []
    for n in lengths:
        policy = uniform(n, -3, 0)
        document = {
            "policy_logp": policy.clone().requires_grad_(),
            "engine_logp": (policy + uniform(n, -1.5, 1.5)).clamp(max=0.0),
            "proximal_logp": (policy + uniform(n, -0.5, 0.5)).clamp(max=0.0),
            "reference_logp": (policy + uniform(n, -1, 1)).clamp(max=0.0),
            "advantages": uniform(1, -2, 2).expand(n).clone(),
            "loss_mask": uniform(n, 0, 1) < 0.7,
            "entropy": uniform(n, 0, 2).requires_grad_(),
            "distill_kl": uniform(n, 0, 2).requires_grad_(),
            "distill_mask": uniform(n, 0, 1) < 0.2,
        }
        document["engine_logp"][uniform(n, 0, 1) < 0.1] = math.nan
        streams.append(document)
    counts = [_num_counted(document) for document in streams]
    weights, denominator = reduction_weights(counts, kind=config.reduction, fixed_length=config.fixed_length)
    for weight, document in zip(weights, streams, strict=True):
        document["loss_weight"] = torch.full_like(document["advantages"], weight)
    leaves = [document[name] for document in streams for name in LEAVES]
    return Step(streams, leaves, denominator)


def _num_counted(document: dict[str, Tensor]) -> int:
    known = document["engine_logp"].isfinite()
    return int((document["distill_mask"] | (document["loss_mask"] & known)).sum())


def pack(documents: list[dict[str, Tensor]], padding: dict[str, Tensor]) -> RlStreams:
    """Documents end to end, padding last."""
    documents = [*documents, padding]
    names = [field.name for field in fields(RlStreams) if field.name != "sequence_ids"]
    packed = {name: torch.cat([document[name] for document in documents]) for name in names}
    sizes = torch.tensor([len(document["advantages"]) for document in documents])
    return RlStreams(**packed, sequence_ids=torch.arange(len(documents)).repeat_interleave(sizes))


def padding_of(size: int) -> dict[str, Tensor]:
    """A document that nothing may read: all its streams are NaN."""
    streams = {field.name: torch.full((size,), math.nan, dtype=torch.float64) for field in fields(RlStreams)}
    for name in LEAVES:
        streams[name].requires_grad_()
    return streams | {name: torch.zeros(size, dtype=torch.bool) for name in ("loss_mask", "distill_mask")}


def run(
    step: Step, parts: list[list[int]], paddings: list[int], config: LossConfig
) -> tuple[list[Tensor], Tensor, dict[str, Value]]:
    """(gradient of every leaf summed over the parts, summed loss, merged metrics)."""
    total = [torch.zeros_like(leaf) for leaf in step.leaves]
    losses: list[Tensor] = []
    stats: list[LossStats] = []
    for part, size in zip(parts, paddings, strict=True):
        padding = padding_of(size)
        batch = pack([step.streams[number] for number in part], padding)
        loss, part_stats = rl_loss(batch, config=config, denominator=step.denominator, noise=NOISE, distill_coef=0.7)
        leaves = [*step.leaves, *(padding[name] for name in LEAVES)]
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
        assert all((gradient == 0).all() for gradient in gradients[len(step.leaves) :])
        total = [have + new for have, new in zip(total, gradients, strict=False)]
        losses.append(loss.detach())
        stats.append(part_stats)
    return total, torch.stack(losses).sum(), merge_metrics([part.metrics for part in stats])


SPLIT = st.integers(1, 5).flatmap(
    lambda count: st.tuples(
        st.lists(st.integers(0, 8), min_size=count, max_size=count),
        st.permutations(range(count)),
        st.lists(st.integers(0, 3), min_size=count, max_size=count),
        st.lists(st.integers(0, 3), min_size=4, max_size=4),
        st.integers(0, 2**16),
        st.sampled_from(["token_mean", "sequence_mean", "fixed_length"]),
    )
)


@pytest.mark.parametrize("case", list(CASES))
@settings(max_examples=8)
@given(split=SPLIT)
def test_the_gradient_of_a_step_does_not_depend_on_how_its_documents_are_split(
    case: str, split: tuple[list[int], list[int], list[int], list[int], int, str]
) -> None:
    """Four parts (ranks and microbatches), some without documents, in any packing order, against one pack."""
    lengths, order, part_of, paddings, seed, reduction = split
    config = config_of(case, reduction)
    step = make_step(lengths, seed, config)
    whole, loss, metrics = run(step, [list(range(len(lengths)))], [0], config)
    parts = [[number for number in order if part_of[number] == part] for part in range(4)]
    split_up, split_loss, split_metrics = run(step, parts, paddings, config)
    for got, want in zip(split_up, whole, strict=True):
        assert got.isfinite().all()
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-14)
    torch.testing.assert_close(split_loss, loss, rtol=1e-9, atol=1e-12)
    assert split_metrics.keys() == metrics.keys()
    for name, value in metrics.items():
        assert split_metrics[name].result() == pytest.approx(value.result(), rel=1e-9, abs=1e-12, nan_ok=True), name


@pytest.mark.parametrize("case", ["btv", "gspo-everything", "btv-shrink"])
def test_every_term_reaches_its_tokens(case: str) -> None:
    """The step above is a test only if tokens of every kind are in it and every stream has a gradient."""
    config = config_of(case)
    step = make_step([40, 1, 25, 60], 7, config)
    gradients, _, metrics = run(step, [[0, 1, 2, 3]], [5], config)
    by_name = {name: torch.cat(gradients[number :: len(LEAVES)]) for number, name in enumerate(LEAVES)}
    counted = torch.cat([document["loss_mask"] for document in step.streams])
    distilled = torch.cat([document["distill_mask"] for document in step.streams])
    assert (by_name["distill_kl"] != 0).equal(distilled)
    assert (by_name["policy_logp"][distilled | ~counted] == 0).all() and (by_name["policy_logp"] != 0).sum() > 20
    assert (by_name["entropy"] != 0).any() == (config.entropy is not None)
    for name in ("tokens/missing_logp", "tokens/distilled", "mask/share"):
        assert metrics[name].result() > 0
