"""Streams of other policies on a step's batches, and KL taken off its advantages."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron_rl_kernels import LogprobOut

from megatron_rl.config import RunError
from megatron_rl.data.packing import pack_samples
from megatron_rl.model.forward import DeviceBatch
from megatron_rl.records import PackedBatch, Sample
from megatron_rl.trainer.rl_streams import rl_streams
from megatron_rl.trainer.scores import with_kl_penalty, with_scores

CPU = torch.device("cpu")


@pytest.fixture
def one_rank(world_of_one: None) -> Any:
    """Groups of a world of one rank."""
    return SimpleNamespace(dp_size=1, dp_group=dist.group.WORLD)


def sample(group: str, rollout: int, segment: int, *, length: int, engine_logp: float, advantage: float) -> Sample:
    mask = np.ones(length, dtype=bool)
    mask[:2] = False
    return Sample(
        sample_id=f"{group}#{rollout}/{segment}",
        token_ids=np.arange(length, dtype=np.int32),
        loss_mask=mask,
        advantages=np.full(length, advantage, dtype=np.float32),
        engine_logp=np.where(mask, engine_logp, np.nan).astype(np.float32),
        weight_version=np.where(mask, 3, -1).astype(np.int32),
        info={"group_id": group, "rollout": rollout, "segment": segment},
    )


def packed() -> list[PackedBatch]:
    samples = [
        sample("a", 0, 0, length=6, engine_logp=-1.0, advantage=0.5),
        sample("a", 1, 0, length=4, engine_logp=-2.0, advantage=-0.5),
        sample("a", 1, 1, length=5, engine_logp=-1.5, advantage=-0.5),
        sample("b", 0, 0, length=3, engine_logp=-0.5, advantage=0.25),
        sample("b", 1, 0, length=7, engine_logp=-0.25, advantage=-0.25),
    ]
    return pack_samples(samples, capacity=12, pad_multiple=4)


class Shifted:
    """Says of every target that its log-prob is minus its id over 100, less a constant."""

    def __init__(self, constant: float) -> None:
        self.constant, self.temperatures = constant, []

    def score_all(self, batches: Sequence[DeviceBatch], *, temperature: float) -> list[LogprobOut]:
        self.temperatures.append(temperature)
        logp = [-batch.target_ids / 100 - self.constant for batch in batches]
        return [LogprobOut(one, one) for one in logp]


def test_each_policy_adds_its_own_stream_at_the_sampling_temperature_and_nothing_else() -> None:
    batches, reference, proximal = packed(), Shifted(1.0), Shifted(2.0)
    policies = {"proximal": proximal, "reference": reference}
    scored = with_scores(batches, policies, temperature=0.7, device=CPU)
    assert reference.temperatures == proximal.temperatures == [0.7], "one pass over all batches"
    for before, after in zip(batches, scored, strict=True):
        assert after.reference_logp is not None and after.proximal_logp is not None
        np.testing.assert_allclose(after.reference_logp, -before.target_ids / 100 - 1, rtol=1e-6)
        np.testing.assert_allclose(after.proximal_logp, -before.target_ids / 100 - 2, rtol=1e-6)
        rest = msgspec.structs.replace(after, reference_logp=None, proximal_logp=None)
        assert all(getattr(rest, name) is getattr(before, name) for name in ("input_ids", "advantages", "engine_logp"))
    assert with_scores(batches, {}, temperature=0.7, device=CPU) == batches, "no policy, no pass"


def test_kl_in_the_reward_moves_each_segment_by_its_own_sum_less_the_mean_of_its_group(one_rank: Any) -> None:
    scored = with_scores(packed(), {"reference": Shifted(1.0)}, temperature=1.0, device=CPU)
    scored[0].engine_logp[2] = np.nan  # type: ignore[index]  # a trained token whose log-prob is missing
    penalised = with_kl_penalty(scored, one_rank, coef=0.1)
    kl: dict[tuple[str, int], list[float]] = {}
    moved: dict[tuple[str, int], list[float]] = {}
    for before, after in zip(scored, penalised, strict=True):
        assert before.engine_logp is not None and before.reference_logp is not None
        assert before.advantages is not None and after.advantages is not None
        for number, info in enumerate(before.info):
            start, end = before.cu_seqlens[number], before.cu_seqlens[number + 1]
            k1 = before.engine_logp[start:end] - before.reference_logp[start:end]
            trained = before.loss_mask[start:end] & np.isfinite(before.engine_logp[start:end])
            key = (info["group_id"], info["rollout"])
            kl.setdefault(key, []).append(float(k1[trained].sum()))
            shift = after.advantages[start:end] - before.advantages[start:end]
            moved.setdefault(key, []).append(float(shift[0]))
            np.testing.assert_allclose(shift, shift[0], atol=1e-6)
    for group in ("a", "b"):
        rollouts = [key for key in kl if key[0] == group]
        baseline = np.mean([np.mean(kl[key]) for key in rollouts])
        for key in rollouts:
            np.testing.assert_allclose(moved[key], [-0.1 * (one - baseline) for one in kl[key]], atol=1e-6)


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_a_reference_that_gives_no_number_is_named_before_any_advantage_is_formed(one_rank: Any, value: float) -> None:
    scored = with_scores(packed(), {"reference": Shifted(1.0)}, temperature=1.0, device=CPU)
    logp = scored[0].reference_logp
    assert logp is not None
    logp[~scored[0].loss_mask] = value
    with_kl_penalty(scored, one_rank, coef=0.1)  # untrained tokens may hold anything
    logp[2:4] = value
    named = r"reference policy.*in 1 of the step's 5 segments; look for NaN weights in trainer\.reference\.path"
    with pytest.raises(RunError, match=named):
        with_kl_penalty(scored, one_rank, coef=0.1)


def test_the_loss_reads_every_stream_and_documents_are_numbered_as_they_lie() -> None:
    batch = with_scores(packed(), {"reference": Shifted(1.0)}, temperature=1.0, device=CPU)[0]
    batch.loss_weight = np.linspace(0, 1, batch.num_tokens, dtype=np.float32)
    logp = torch.zeros(batch.num_tokens, requires_grad=True)
    streams = rl_streams(LogprobOut(logp, logp), batch, CPU)
    assert streams.policy_logp is logp and streams.proximal_logp is None
    assert streams.reference_logp is not None and streams.loss_weight is not None and streams.sequence_ids is not None
    borders = streams.sequence_ids.diff().nonzero().flatten() + 1
    assert borders.tolist() == batch.cu_seqlens[1:-1].tolist()
