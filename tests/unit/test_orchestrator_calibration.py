"""What the objective asks of the orchestrator: weights of the reduction, and rollouts that are only measured."""

import asyncio
import runpy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_rl.loss.config import LossConfig
from megatron_rl.orchestrator.calibration import CalibrationError
from megatron_rl.orchestrator.loop import weigh_tokens
from megatron_rl.records import Sample, wire

STAND_INS = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("test_orchestrator.py"))))
CALIBRATION = wire.CalibrationRequest(step=5, weight_version=5, data_parallel_size=2, num_rollouts=3)


def sample(rollout: int, segment: int, num_trained: int, *, missing: int = 0) -> Sample:
    mask = np.ones(1 + num_trained + missing, dtype=bool)
    mask[0] = False
    engine_logp = np.full(len(mask), -1.0, dtype=np.float32)
    engine_logp[1 : 1 + missing] = np.nan
    info = {"group_id": "g", "rollout": rollout, "segment": segment}
    return Sample(f"g#{rollout}/{segment}", np.zeros(len(mask), np.int32), mask, engine_logp=engine_logp, info=info)


def test_a_token_mean_counts_known_tokens_and_carries_no_weights() -> None:
    samples = [sample(0, 0, 3, missing=2), sample(1, 0, 5)]
    assert weigh_tokens(samples, LossConfig()) == 8
    assert all(one.loss_weight is None for one in samples)


def test_a_sequence_mean_gives_every_rollout_the_same_weight_with_all_its_segments() -> None:
    samples = [sample(0, 0, 3, missing=2), sample(0, 1, 1), sample(1, 0, 5)]
    denominator = weigh_tokens(samples, LossConfig(reduction="sequence_mean"))
    shares = []
    for one in samples:
        assert one.loss_weight is not None and one.engine_logp is not None
        shares.append(one.loss_weight[one.loss_mask & np.isfinite(one.engine_logp)].sum() / denominator)
    assert shares == pytest.approx([3 / 8, 1 / 8, 1 / 2])


def test_a_fixed_length_divides_by_rollouts_times_length() -> None:
    assert weigh_tokens([sample(0, 0, 3), sample(1, 0, 5)], LossConfig(reduction="fixed_length", fixed_length=10)) == 20


def test_a_calibration_draws_no_prompt_of_the_run_and_always_the_same_ones() -> None:
    orchestrator, source, engine = STAND_INS.make(["a", "x"])
    before = source.state
    ranks = asyncio.run(orchestrator.calibration_batch(CALIBRATION))
    assert source.state == before and source.state.draws == 0 and engine.calls == 3
    names = [name for rank in ranks for packed in rank for name in packed.sample_ids]
    assert len(ranks) == 2 and len(set(names)) == 3
    for packed in (packed for rank in ranks for packed in rank):
        assert packed.advantages is not None and not packed.advantages.any()
    assert sum(packed.num_trained for rank in ranks for packed in rank) == 6
    again, _, _ = STAND_INS.make(["a", "x"])
    repeated = asyncio.run(again.calibration_batch(CALIBRATION))
    assert names == [name for rank in repeated for packed in rank for name in packed.sample_ids]


def test_a_failed_rollout_is_left_out_and_only_if_all_fail_is_it_an_error() -> None:
    orchestrator, _, _ = STAND_INS.make(["a", RuntimeError("down"), "b"])
    ranks = asyncio.run(orchestrator.calibration_batch(CALIBRATION))
    assert sum(len(packed.sample_ids) for rank in ranks for packed in rank) == 2
    orchestrator, _, _ = STAND_INS.make([RuntimeError("down")])
    with pytest.raises(CalibrationError, match=r"all 3 failed.*down"):
        asyncio.run(orchestrator.calibration_batch(CALIBRATION))
