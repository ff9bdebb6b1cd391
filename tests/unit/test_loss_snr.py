"""Signal and noise: a planted answer comes back, bounds equal those worked by hand, the verdict follows."""

import math
from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from megatron_rl.loss.bounds import derive_bounds, ess_guard, ess_share
from megatron_rl.loss.identity import IdentityError
from megatron_rl.loss.snr import (
    EDGES,
    NoiseTable,
    SnrConfig,
    Streams,
    apply_guard,
    expressed_variance,
    measure,
    noise_table,
    record_metrics,
    snr_table,
)
from megatron_rl.telemetry.snr_log import SnrRecord

DTYPES = pytest.mark.parametrize("dtype", [np.float64, np.float32], ids=str)
BINS = 7
EVEN = [0.001 * n for n in range(-200, 201)]
"""401 log-ratios from -.2 to .2: their .995 quantile is the 398th step, .198."""


def confidences(number: int, tokens: int, random: np.random.Generator) -> np.ndarray:
    """Probabilities inside a bin, off its edges. [tokens]"""
    low, high = EDGES[number], EDGES[number + 1]
    return random.uniform(low + 0.1 * (high - low), high - 0.2 * (high - low), tokens)


def planted(
    signal: list[float], noise: list[float], *, tokens: int = 40_000, seed: int = 0, dtype: Any = np.float64
) -> tuple[Streams, Streams]:
    """(calibration, live): log r of each bin is normal with the given standard deviations."""
    random = np.random.default_rng(seed)
    streams = []
    for moves in (False, True):
        policy, engine = [], []
        for number in range(BINS):
            logp = np.log(confidences(number, tokens, random))
            log_ratio = noise[number] * random.standard_normal(tokens)
            log_ratio += moves * signal[number] * random.standard_normal(tokens)
            policy.append(logp)
            engine.append(logp - log_ratio)
        order = random.permutation(BINS * tokens)
        streams.append(
            Streams(np.concatenate(policy)[order].astype(dtype), np.concatenate(engine)[order].astype(dtype))
        )
    return streams[0], streams[1]


def in_bin(number: int, log_ratio: list[float]) -> Streams:
    """Tokens of one bin with exactly these log r."""
    logp = np.full(len(log_ratio), math.log((EDGES[number] + EDGES[number + 1]) / 2))
    return Streams(logp, logp - np.array(log_ratio))


def joined(*streams: Streams) -> Streams:
    return Streams(
        np.concatenate([np.asarray(one.policy_logp) for one in streams]),
        np.concatenate([np.asarray(one.engine_logp) for one in streams]),
    )


NOISE = [0.05 * (1 - (low + high) / 2) for low, high in pairwise(EDGES)]
FACTORS = [3.0, 2.0, 1.5, 1.0, 2.5, 1.2, 2.0]
SIGNAL = [factor * sd for factor, sd in zip(FACTORS, NOISE, strict=True)]


@DTYPES
@pytest.mark.parametrize("noises", [NOISE, [0.1] * BINS], ids=["gated", "even"])
def test_planted_signal_and_noise_come_back_within_five_percent(noises: list[float], dtype: type[np.floating]) -> None:
    signals = [factor * noise for factor, noise in zip(FACTORS, noises, strict=True)]
    cal, live = planted(signals, noises, dtype=dtype)
    rows = snr_table(live.policy_logp, live.engine_logp, cal.policy_logp, cal.engine_logp)
    assert [(row.low, row.high) for row in rows] == list(pairwise(EDGES))
    for row, signal, noise in zip(rows, signals, noises, strict=True):
        snr = (signal / noise) ** 2
        assert row.snr == pytest.approx(snr, rel=0.05)
        assert row.shrink == pytest.approx(snr / (1 + snr), rel=0.05)
        assert row.var_cal == pytest.approx(noise**2, rel=0.03) and row.var_signal == pytest.approx(signal**2, rel=0.05)
        assert abs(row.snr - snr) < 4 * row.snr_error < 0.1 * (1 + snr)
        assert (row.tokens_cal, row.tokens_live) == (40_000, 40_000)


def test_the_error_of_snr_is_how_much_it_varies() -> None:
    found = [
        snr_table(live.policy_logp, live.engine_logp, cal.policy_logp, cal.engine_logp)[2]
        for cal, live in (planted(SIGNAL, NOISE, tokens=500, seed=seed) for seed in range(60))
    ]
    assert np.std([row.snr for row in found]) == pytest.approx(np.mean([row.snr_error for row in found]), rel=0.3)


def test_the_record_has_the_planted_answer_and_it_survives_its_file() -> None:
    cal, live = planted(SIGNAL, NOISE, tokens=5000)
    record = measure(cal, live, step=20, weight_version=21)
    assert record.identity.ok and (record.step, record.weight_version) == (20, 21)
    total = sum(s * s for s in SIGNAL) / sum(n * n for n in NOISE)
    assert record.snr == pytest.approx(total, rel=0.1) and record.verdict == "signal-dominated"
    table = noise_table(record)
    for number, (signal, noise) in enumerate(zip(SIGNAL, NOISE, strict=True)):
        wanted = max(2.5758 * noise, 2 * signal)
        assert table.upper[number] == pytest.approx(wanted, rel=0.12)
        assert table.lower[number] == pytest.approx(-wanted, rel=0.12)
    assert table.edges == EDGES
    import msgspec

    assert msgspec.json.decode(msgspec.json.encode(record), type=SnrRecord) == record


def test_without_noise_or_movement_nothing_divides_by_zero() -> None:
    still = in_bin(3, [0.0] * 500)
    (row,) = [row for row in measure(still, still, step=1, weight_version=1).rows if row.tokens_cal]
    assert (row.snr, row.shrink, row.lower, row.upper) == (0.0, 0.0, 0.0, 0.0)
    moved = in_bin(3, [0.1, -0.1] * 250)
    (row,) = [row for row in measure(still, moved, step=1, weight_version=1).rows if row.tokens_cal]
    assert row.snr is not None and row.snr > 1e10 and row.shrink == pytest.approx(1)
    assert row.upper == pytest.approx(0.2, rel=0.01)


def test_movement_cannot_be_negative() -> None:
    rows = measure(in_bin(1, [0.2, -0.2] * 300), in_bin(1, [0.1, -0.1] * 300), step=1, weight_version=1).rows
    assert rows[1].snr == 0 and rows[1].var_signal == 0 and rows[1].verdict == "noise-dominated"


def test_bins_whose_variances_differ_by_chance_do_not_add_up_to_movement() -> None:
    """One bin reads half of its noise as movement, the other one as much too little."""
    wide, narrow = ([one * math.sqrt(share) for one in EVEN] for share in (1.5, 0.5))
    calibration = joined(in_bin(3, EVEN), in_bin(4, EVEN))
    record = measure(calibration, joined(in_bin(3, wide), in_bin(4, narrow)), step=1, weight_version=1)
    assert [row.snr for row in record.rows[3:5]] == pytest.approx([0.5, 0.0])
    assert record.snr == pytest.approx(0.0, abs=1e-6) and record.verdict == "noise-dominated"


def test_the_record_says_which_bins_pool_and_with_which() -> None:
    cal = joined(in_bin(1, [0.1, -0.1] * 250), in_bin(2, [0.3, -0.3] * 10))
    live = joined(in_bin(1, [0.2, -0.2] * 250), in_bin(2, [0.3, -0.3] * 250))
    record = measure(cal, live, step=1, weight_version=1)
    row = record.rows[2]
    noise, both = (500 * 0.01 + 20 * 0.09) / 519, (500 * 0.04 + 500 * 0.09) / 999
    assert row.pool == [1, 2] and row.shrink == pytest.approx(1 - noise / both, rel=1e-6)
    assert row.signal == pytest.approx(2 * math.sqrt(both - noise)) and row.var_cal == pytest.approx(0.09, rel=0.06)
    assert (
        "p in 0.3-0.5 has 20 calibration and 500 live tokens, fewer than 400: lambda and bounds are those of 0.1-0.5 "
        "together" in record.notes
    )
    assert record.snr == pytest.approx(record.rows[1].snr), "pooled rows do not count twice"


@pytest.mark.parametrize("live", [None, Streams([], []), Streams([-1.0], [math.nan])])
def test_before_the_first_step_bounds_are_the_noises_and_nothing_shrinks(live: Streams | None) -> None:
    record = measure(in_bin(2, [*EVEN, *EVEN]), live, step=0, weight_version=0)
    assert record.live is None and record.snr is None and record.verdict == "noise only"
    assert record.rows[2].upper == pytest.approx(0.198, abs=1e-3) and record.rows[2].snr is None
    assert noise_table(record).shrink == (1.0,) * BINS
    assert any("no live window yet" in note for note in record.notes)


@pytest.mark.parametrize(
    ("ratio", "verdict", "words"),
    [
        (2.0, "signal-dominated", "can be trusted"),
        (1.0, "mixed", "derived or shrink"),
        (0.3, "noise-dominated", "loss.proximal"),
    ],
)
def test_the_verdict_follows_the_ratio(ratio: float, verdict: str, words: str) -> None:
    cal, live = planted([ratio * sd for sd in NOISE], NOISE, tokens=4000)
    record = measure(cal, live, step=1, weight_version=1)
    assert record.verdict == verdict
    assert any(words in line for line in record.advice)
    assert all(row.verdict == verdict for row in record.rows)


def test_movement_beyond_the_sample_size_asks_for_less_staleness() -> None:
    record = measure(in_bin(0, EVEN), in_bin(0, [0.0, 4.0] * 300), step=1, weight_version=1)
    (line,) = [line for line in record.advice if "staleness" in line]
    assert line.startswith("lower the staleness or factor the ratio") and "for p in 0-0.1 " in line
    calm = measure(in_bin(0, EVEN), in_bin(0, [0.1, -0.1] * 300), step=1, weight_version=1)
    assert not any("staleness" in line for line in calm.advice)


def test_a_broken_identity_is_the_first_advice() -> None:
    record = measure(in_bin(4, [-0.1, -0.2] * 300), None, step=0, weight_version=0)
    assert not record.identity.ok and record.advice[0].startswith("stop: ") and "top-p" in record.advice[0]


def test_a_calibration_without_any_engine_log_prob_stops() -> None:
    with pytest.raises(IdentityError, match=r"100\.00% of them missing"):
        measure(Streams([-1.0, -2.0], [math.nan, -math.inf]), None, step=0, weight_version=0)


def test_summaries_equal_hand_computation() -> None:
    confidence = [0.01, 0.2, 0.3, 0.8, 0.9]
    ratios = [3.0, 1.0, 0.4, 1.0, 1.0]
    logp = np.log(confidence)
    record = measure(
        Streams(logp, logp - np.log(ratios)), None, step=0, weight_version=0, config=SnrConfig(min_tokens=200)
    )
    summary = record.calibration
    assert summary.tokens == 5
    assert summary.mean_ratio == pytest.approx(6.4 / 5) and summary.capped_mean_ratio == pytest.approx(5.4 / 5)
    assert summary.abs_mean == pytest.approx((math.log(3) - math.log(0.4)) / 5) and summary.abs_median == 0
    assert summary.abs_max == pytest.approx(math.log(3))
    assert summary.abs_p99 == pytest.approx(math.log(3) - 0.04 * (math.log(3) + math.log(0.4)))
    assert summary.ess == pytest.approx(6.4**2 / (5 * (9 + 3 + 0.16)))
    assert summary.k3 == pytest.approx((6.4 - 5 - math.log(3) - math.log(0.4)) / 5)
    assert summary.outside == 0.4 and summary.outside_on_forks == 0.5, "the fork is the token of p = .01"
    assert summary.mass_on_forks == pytest.approx(math.log(3) / (math.log(3) - math.log(0.4)))


def test_k3_is_the_kl_from_engine_to_policy() -> None:
    """Over tokens that come exactly as often as the engine samples them."""
    policy, engine, counts = np.array([0.5, 0.2, 0.3]), np.array([0.3, 0.1, 0.6]), [3, 1, 6]
    record = measure(
        Streams(np.repeat(np.log(policy), counts), np.repeat(np.log(engine), counts)), None, step=0, weight_version=0
    )
    assert record.calibration.k3 == pytest.approx(float(np.sum(engine * np.log(engine / policy))))


def test_expressed_variance_is_that_of_noisy_logits() -> None:
    random, sigma = torch.Generator().manual_seed(0), 0.02
    logits = torch.randn(4, 9, generator=random, dtype=torch.float64) * torch.tensor([[0.1], [1.0], [2.0], [6.0]])
    token_ids = logits.argmax(-1)
    noisy = logits + sigma * torch.randn(10_000, 4, 9, generator=random, dtype=torch.float64)
    taken = noisy.log_softmax(-1).gather(-1, token_ids.expand(10_000, 4)[..., None]).squeeze(-1)
    exact = expressed_variance(sigma, logits.softmax(-1), token_ids)
    torch.testing.assert_close(taken.var(0), exact, rtol=0.05, atol=0)
    certain = torch.tensor([[1.0, 0.0, 0.0]])
    assert expressed_variance(0.3, certain, torch.tensor([0])).tolist() == [0.0]
    thin = torch.full((1, 10_000), 1e-4)
    assert expressed_variance(0.3, thin, torch.tensor([0])).item() == pytest.approx(0.09, rel=1e-3)


@DTYPES
def test_derived_and_shrunk_weights_come_from_the_measured_bins(dtype: type[np.floating]) -> None:
    cal, live = planted(SIGNAL, NOISE, tokens=2000)
    record = measure(cal, live, step=1, weight_version=1)
    table = NoiseTable.from_dict(noise_table(record).to_dict())
    confidence = torch.tensor([0.05, 0.6, 0.999], dtype=torch.float64 if dtype is np.float64 else torch.float32)
    far = torch.full_like(confidence, 5.0)
    derived = apply_guard(far, confidence, kind="derived", table=table).log_weight
    assert derived.tolist() == pytest.approx([record.rows[number].upper for number in (0, 3, 6)], rel=1e-6)
    shrunk = apply_guard(-far, confidence, kind="shrink", table=table).log_weight
    assert shrunk.tolist() == pytest.approx([-5 * record.rows[number].shrink for number in (0, 3, 6)], rel=1e-6)


def test_metrics_name_what_was_measured_and_leave_out_what_was_not() -> None:
    cal, live = planted(SIGNAL, NOISE, tokens=500)
    metrics = record_metrics(measure(cal, live, step=1, weight_version=1))
    assert {"snr/identity", "snr/total", "snr/mismatch_kl", "snr/bin/0-0.1", "snr/noise/0.99-1"} <= metrics.keys()
    assert metrics["snr/noise/0.1-0.3"].result() == pytest.approx(NOISE[1], rel=0.1)
    first = record_metrics(measure(cal, None, step=0, weight_version=0))
    assert "snr/total" not in first and "snr/bin/0-0.1" not in first and "snr/noise/0-0.1" in first


def test_tensors_and_missing_tokens_measure_as_arrays_without_them() -> None:
    cal, live = planted(SIGNAL, NOISE, tokens=500, dtype=np.float32)
    with_gaps = [
        Streams(
            torch.cat([torch.tensor(np.asarray(one.policy_logp)), torch.tensor([-1.0, -1.0])]),
            torch.cat([torch.tensor(np.asarray(one.engine_logp)), torch.tensor([math.nan, -math.inf])]),
        )
        for one in (cal, live)
    ]
    record = measure(with_gaps[0], with_gaps[1], step=1, weight_version=1)
    assert record.rows == measure(cal, live, step=1, weight_version=1).rows
    assert record.identity.missing == pytest.approx(2 / 3502)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="edges must rise from 0 to 1"):
        snr_table(None, None, [-1.0], [-1.0], edges=(0.0, 0.5, 0.4, 1.0))
    with pytest.raises(ValueError, match=r"floor of ESS/N must be in \(0, 1\], got 1.5"):
        ess_guard([0.0], floor=1.5)
    with pytest.raises(ValueError, match="needs tokens, got none"):
        ess_guard([])
    with pytest.raises(ValueError, match="bounds need calibration tokens with an engine log-prob"):
        derive_bounds(None, None, [-1.0], [math.nan])
    with pytest.raises(ValueError, match=r"policy_logp must be a log-prob, finite and at most 0, got nan"):
        measure(Streams([-1.0], [-1.0]), Streams([math.nan], [-1.0]), step=0, weight_version=0)
    assert math.isnan(ess_share([]))
    with pytest.raises(ValueError, match=r"min_tokens must be at least 1 / \(1 - quantile\) = 200, got 100"):
        SnrConfig(min_tokens=100)


def test_noise_of_which_a_small_calibration_saw_too_little_is_not_called_signal() -> None:
    """Two in a hundred tokens carry nearly all the noise, on both passes alike: nothing has moved."""
    random = np.random.default_rng(0)

    def one_pass(count: int) -> Streams:
        size = np.where(random.random(count) < 0.02, 1.0, 0.03)
        rest = 10 ** random.uniform(-5, -2, count)
        policy = np.log1p(-rest)
        return Streams(policy, np.minimum(policy - size * rest * random.standard_normal(count), 0.0))

    verdicts = [measure(one_pass(600), one_pass(20_000), step=1, weight_version=1).verdict for _ in range(100)]
    assert verdicts.count("signal-dominated") <= 10, Counter(verdicts)
