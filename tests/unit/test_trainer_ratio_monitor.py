"""What the trainer measures of its importance ratio: which tokens, against what, and who learns of it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from megatron_rl_kernels import LogprobOut

from megatron_rl.data.packing import pack_samples
from megatron_rl.loss.snr import IdentityError, SnrConfig
from megatron_rl.loss.streams import RlStreams
from megatron_rl.records import PackedBatch, Sample
from megatron_rl.telemetry.snr_log import read_snr
from megatron_rl.trainer.ratio_monitor import RatioMonitor

CONFIG = SnrConfig(window_tokens=3000, min_tokens=200)


@pytest.fixture
def one_rank(world_of_one: None) -> Any:
    """Groups of a world of one rank."""
    return SimpleNamespace(rank=0, world_size=1, dp_size=1, pp_rank=0, place=SimpleNamespace(tp=0, cp=0))


def packed(num_trained: int, engine_logp: np.ndarray) -> PackedBatch:
    """One document: as many prompt as trained tokens, padded."""
    mask = np.repeat([False, True], num_trained)
    stream = np.full(2 * num_trained, np.nan, dtype=np.float32)
    stream[mask] = engine_logp
    sample = Sample("s", np.zeros(len(mask), np.int32), mask, engine_logp=stream, advantages=np.zeros(len(mask), "f4"))
    return pack_samples([sample], capacity=len(mask), pad_multiple=64)[0]


def streams(batch: PackedBatch, policy: np.ndarray, proximal: np.ndarray | None = None) -> RlStreams:
    """The loss's streams, NaN wherever no token is trained."""

    def spread(values: np.ndarray) -> torch.Tensor:
        whole = torch.full((batch.num_tokens,), torch.nan)
        whole[torch.from_numpy(batch.loss_mask)] = torch.from_numpy(values).float()
        return whole

    assert batch.engine_logp is not None
    return RlStreams(
        policy_logp=spread(policy).requires_grad_(),
        engine_logp=torch.tensor(batch.engine_logp),
        advantages=torch.zeros(batch.num_tokens),
        loss_mask=torch.from_numpy(batch.loss_mask),
        proximal_logp=None if proximal is None else spread(proximal),
    )


def calibrate(monitor: RatioMonitor, *, noise: float, random: np.random.Generator, shift: float = 0.0) -> None:
    """1,500 tokens of a policy that gives each of its 8 continuations the same probability."""
    policy = np.full(1500, -np.log(8.0))
    eta = noise * random.standard_normal(1500) + noise**2 / 2
    batch = packed(1500, np.minimum(policy + eta + shift, 0.0))
    whole = torch.full((batch.num_tokens,), float(policy[0]))
    monitor.add_calibration(LogprobOut(whole, torch.full_like(whole, float(np.log(8.0)))), batch)


def test_the_window_holds_the_newest_trained_tokens_and_no_prompt_or_padding(tmp_path: Path, one_rank: Any) -> None:
    random, monitor = np.random.default_rng(0), RatioMonitor(CONFIG, tmp_path, one_rank)
    for movement in (5.0, 0.0, 0.2):
        batch = packed(1500, np.full(1500, -2.0))
        monitor.watch(streams(batch, -2.0 + movement * random.uniform(-0.3, 0.3, 1500)), batch)
    calibrate(monitor, noise=0.1, random=random)
    record, _ = monitor.measure(20, must_hold=True)
    assert record.live is not None and record.live.tokens == 3000, "5.0 has left it, the others fill it"
    assert record.live.abs_max is not None and record.live.abs_max < 0.061
    assert record.calibration.tokens == 1500 and read_snr(tmp_path) == [record]
    calibrate(monitor, noise=0.1, random=random)
    later, _ = monitor.measure(40, must_hold=True)
    assert later.calibration.tokens == 1500, "each calibration starts anew"


def test_with_a_proximal_policy_guards_learn_of_its_ratio_and_people_of_the_whole(
    tmp_path: Path, one_rank: Any
) -> None:
    random, monitor = np.random.default_rng(1), RatioMonitor(CONFIG, tmp_path, one_rank)
    calibrate(monitor, noise=0.1, random=random)
    engine = np.full(1500, -np.log(8.0)) + 0.1 * random.standard_normal(1500)
    batch = packed(1500, engine)
    policy = -np.log(8.0) + 0.5 * random.standard_normal(1500)
    monitor.watch(streams(batch, np.minimum(policy, 0.0), np.full(1500, -np.log(8.0))), batch)
    record, table = monitor.measure(20, must_hold=True)
    assert record.snr is not None and record.snr > 5, "the policy moved"
    assert max(table.shrink) < 0.3 and max(table.upper) < 0.5, "proximal over engine did not"


def test_log_probs_that_were_not_sampled_with_stop_the_run_only_where_asked(tmp_path: Path, one_rank: Any) -> None:
    random, monitor = np.random.default_rng(2), RatioMonitor(CONFIG, tmp_path, one_rank)
    calibrate(monitor, noise=0.0, random=random, shift=-0.5)
    with pytest.raises(IdentityError, match=r"mean ratio of 1\.6"):
        monitor.measure(0, must_hold=True)
    calibrate(monitor, noise=0.0, random=random, shift=-0.5)
    record, _ = monitor.measure(20, must_hold=False)
    assert not record.identity.ok
    assert [one.step for one in read_snr(tmp_path)] == [0, 20], "both are on record"
