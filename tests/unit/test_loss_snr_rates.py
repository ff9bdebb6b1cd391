"""How often the identity check is wrong: hundreds of calibrations of each kind, healthy and with one thing forgotten.

Policies are mostly sure of the next token and fork now and then, as language models do: only forks carry information,
so a calibration of 4000 tokens may hold a hundred that matter.
"""

import math
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import pytest

from megatron_rl.loss.identity import identity_check
from megatron_rl.loss.ratio_streams import Streams
from megatron_rl.rollout.noise import noisy_logp

POOL = 80_000
VOCABULARY = 12
SIZES = (60, 300, 1000, 4000)
FAMILIES = ("rare forks", "forks", "graded", "two ways", "wide", "ranked")
MOST_RUNS = 200


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits - logits.max(1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(1, keepdims=True))


def contexts(family: str, count: int, random: np.random.Generator) -> np.ndarray:
    """Logits of next tokens. float64 [count, VOCABULARY]"""
    logits = random.normal(0, 1.5, (count, VOCABULARY))
    share = {"rare forks": 0.03, "forks": 0.2, "graded": 0.1, "two ways": 0.2}.get(family, 0.0)
    fork = random.random(count) < share
    if family in ("rare forks", "forks"):
        logits[:, 0] += np.where(fork, random.normal(3, 1, count), 14)
    elif family == "graded":
        logits[:, 0] += np.where(fork, random.normal(3, 1.5, count), random.gamma(4, 3, count))
    elif family == "two ways":
        logits -= 20
        logits[:, 0] += 30
        logits[fork, 1] += 30
    elif family == "wide":
        logits *= random.gamma(2.0, 1.0, (count, 1))
    elif family == "ranked":
        logits = -1.2 * np.log(np.arange(1, VOCABULARY + 1)) + 0.5 * logits
    else:
        logits[:, 0] += 40
    return logits


def kept(logits: np.ndarray, top_p: float | None, top_k: int | None) -> np.ndarray:
    """The logits with -inf outside the nucleus or the top k."""
    order = np.argsort(-logits, 1)
    p = np.exp(np.take_along_axis(log_softmax(logits), order, 1))
    inside = np.ones_like(p, dtype=bool) if top_p is None else p.cumsum(1) - p < top_p
    if top_k is not None:
        inside[:, top_k:] = False
    mask = np.empty_like(inside)
    np.put_along_axis(mask, order, inside, 1)
    return np.where(mask, logits, -np.inf)


def tokens(
    logits: np.ndarray,
    random: np.random.Generator,
    *,
    noise: tuple[float, float] = (0.05, 0.05),
    temperatures: tuple[float, float] = (1.0, 1.0),
    top_p: float | None = None,
    top_k: int | None = None,
    reports_raw: bool = False,
    copies: int = 1,
) -> Streams:
    """One token sampled in each context. Pairs are (engine's, trainer's); float32 [contexts * copies]

    copies: tokens sampled in each context, all with the noise of that context.
    """
    engine, trainer = (logits + sigma * random.standard_normal(logits.shape) for sigma in noise)
    engine, trainer = (each.repeat(copies, 0) for each in (engine, trainer))
    used = engine / temperatures[0]
    if top_p is not None or top_k is not None:
        used = kept(used, top_p, top_k)
    policy = log_softmax(trainer / temperatures[1])
    reported = log_softmax(engine if reports_raw else used)
    taken = np.argmax(used - np.log(random.standard_exponential(used.shape)), 1)[:, None]
    entropy = -(np.exp(policy) * policy).sum(1)
    log_probs = (np.take_along_axis(each, taken, 1)[:, 0] for each in (policy, reported))
    return Streams(*(stream.astype(np.float32) for stream in (*log_probs, entropy)))


@lru_cache(maxsize=2)
def pool(family: str, **options: object) -> Streams:
    random = np.random.default_rng(0)
    return tokens(contexts(family, POOL, random), random, **options)  # pyright: ignore[reportArgumentType]


def calibrations(streams: Streams, size: int, most: int = MOST_RUNS) -> Iterator[Streams]:
    """Disjoint parts of so many tokens."""
    arrays = [np.asarray(stream) for stream in (streams.policy_logp, streams.engine_logp, streams.entropy)]
    for start in range(0, min(len(arrays[0]) - size + 1, most * size), size):
        yield Streams(*(array[start : start + size] for array in arrays))


def diagnoses(runs: Iterator[Streams]) -> Counter[str]:
    return Counter(identity_check(one.policy_logp, one.engine_logp, entropy=one.entropy).diagnosis for one in runs)


def alarms(counts: Counter[str]) -> int:
    return counts.total() - counts["ok"]


@pytest.mark.parametrize(
    "family", ["rare forks", *(pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES[1:])]
)
@pytest.mark.parametrize(
    ("noise", "temperature"),
    [((0.05, 0.05), 0.7), ((0.3, 0.3), 1.0), ((0.0, 0.5), 0.7), ((0.5, 0.0), 1.0), ((0.5, 0.5), 1.0)],
)
def test_healthy_runs_do_not_stop(family: str, noise: tuple[float, float], temperature: float) -> None:
    streams = pool(family, noise=noise, temperatures=(temperature, temperature))
    counts = {size: diagnoses(calibrations(streams, size)) for size in SIZES}
    assert sum(map(alarms, counts.values())) <= 1, counts


@pytest.mark.parametrize("sigma", [0.03, 0.07, 0.3])
@pytest.mark.parametrize("contexts_each", [15, 40, 200])
def test_tokens_that_share_contexts_and_so_noise_do_not_stop_a_run(contexts_each: int, sigma: float) -> None:
    random = np.random.default_rng(1)
    logits = contexts("forks", 100 * contexts_each, random)
    streams = tokens(logits, random, noise=(sigma, sigma), copies=16)
    counts = diagnoses(calibrations(streams, 16 * contexts_each))
    assert counts.total() == 100 and alarms(counts) <= 1, counts


@pytest.mark.parametrize("sigma", [0.5, 1.0])
@pytest.mark.parametrize("family", ["forks", "rare forks"])
def test_injected_noise_does_not_stop_a_run_with_or_without_the_entropy(family: str, sigma: float) -> None:
    streams, random = pool(family, noise=(0.0, 0.0)), np.random.default_rng(1)
    policy = np.minimum(np.asarray(streams.policy_logp, dtype=np.float64), 0)
    noise = sigma * (random.standard_normal(POOL) + sigma / 2)
    noisy = Streams(policy, noisy_logp(policy, noise).astype(np.float32), streams.entropy)
    counts = {size: diagnoses(calibrations(noisy, size)) for size in (300, 755, 4000)}
    assert sum(map(alarms, counts.values())) <= 1, counts
    blind = [identity_check(one.policy_logp, one.engine_logp).diagnosis for one in calibrations(noisy, 755)]
    assert len(blind) - blind.count("ok") <= 1, Counter(blind)


@pytest.mark.parametrize("sigma", [0.05, 0.5])
def test_answers_that_end_early_or_at_the_limit_do_not_stop_a_run(sigma: float) -> None:
    """An answer ends with its first unlikely token, or after 32: how many tokens it has depends on what was drawn."""
    random, shape = np.random.default_rng(2), (MOST_RUNS, 16, 32)
    streams = tokens(contexts("forks", math.prod(shape), random), random, noise=(sigma, sigma))
    ends = np.asarray(streams.policy_logp).reshape(shape) < -3
    inside = ends.cumsum(-1) - ends == 0
    counts = Counter[str]()
    for run in range(MOST_RUNS):
        one = (np.asarray(stream).reshape(shape)[run][inside[run]] for stream in vars(streams).values())
        counts += diagnoses(iter([Streams(*one)]))
    assert 0.3 < inside.mean() < 0.9 and alarms(counts) <= 1, counts


def test_a_policy_that_has_no_doubt_does_not_stop_a_run() -> None:
    streams = pool("certain", noise=(0.3, 0.3))
    for size in SIZES:
        assert alarms(diagnoses(calibrations(streams, size))) == 0, size


@pytest.mark.parametrize("temperatures", [(0.7, 1.0), (0.9, 1.0), (1.3, 1.0), (1.0, 0.7), (1.0, 0.9), (1.0, 1.3)])
@pytest.mark.parametrize(("family", "size"), [("rare forks", 4000), ("forks", 1000), ("graded", 1000), ("wide", 600)])
def test_a_temperature_on_one_side_is_named(family: str, size: int, temperatures: tuple[float, float]) -> None:
    counts = diagnoses(calibrations(pool(family, temperatures=temperatures), size, 40))
    assert alarms(counts) == counts.total() and counts["temperature"] >= 0.95 * counts.total(), counts


CURES = {"trainer": "divide the trainer's logits by rollout.temperature", "engine": "report processed log-probs"}


@pytest.mark.parametrize("temperature", [0.7, 1.3])
@pytest.mark.parametrize(("reports_raw", "side"), [(True, "engine"), (False, "trainer")])
def test_the_cure_names_the_side_that_forgot_it(temperature: float, reports_raw: bool, side: str) -> None:
    pair = (temperature, temperature if reports_raw else 1.0)
    found = [
        identity_check(one.policy_logp, one.engine_logp, entropy=one.entropy)
        for one in calibrations(pool("forks", temperatures=pair, reports_raw=reports_raw), 4000)
    ]
    assert {identity.diagnosis for identity in found} == {"temperature"}
    assert sum(CURES[side] in identity.cure for identity in found) >= 0.9 * len(found)


@pytest.mark.parametrize(
    ("family", "options", "diagnosis"),
    [
        ("forks", {"top_p": 0.9}, "truncated"),
        ("forks", {"top_k": 2, "noise": (0.1, 0.1)}, "truncated"),
        ("rare forks", {"top_p": 0.9}, "truncated"),
        ("wide", {"top_p": 0.95}, "truncated"),
        ("forks", {"temperatures": (0.7, 1.0), "reports_raw": True}, "sampler"),
        ("wide", {"top_p": 0.8, "reports_raw": True}, "sampler"),
    ],
)
def test_other_faults_of_a_sampler_are_named(family: str, options: dict[str, object], diagnosis: str) -> None:
    counts = diagnoses(calibrations(pool(family, **options), 4000))
    assert alarms(counts) == counts.total() and counts[diagnosis] >= 0.95 * counts.total(), counts


def test_missing_log_probs_are_named_in_every_run() -> None:
    streams, random = pool("forks"), np.random.default_rng(3)
    engine = np.where(random.random(POOL) < 0.05, np.nan, np.asarray(streams.engine_logp))
    runs = calibrations(Streams(streams.policy_logp, engine, streams.entropy), 1000)
    assert diagnoses(runs).keys() == {"missing"}


@pytest.mark.parametrize(
    ("spread", "sigma"), [((-3.05, -2.95), 0.3), ((-4, -2), 0.5), ((-4, -2), 1.0), ((-3, -1), 1.0)]
)
@pytest.mark.parametrize("side", ["engine", "trainer"])
def test_noise_on_a_policy_that_is_nearly_sure_everywhere_does_not_stop_a_run(
    spread: tuple[float, float], sigma: float, side: str
) -> None:
    """Without forks only sure tokens are left to judge by. spread: exponents of ten between which 1 - p lies."""
    random = np.random.default_rng(4)
    logits = random.normal(0, 1.5, (40_000, VOCABULARY))
    rest = 10 ** random.uniform(*spread, len(logits))
    logits[:, 0] = np.log(np.exp(logits[:, 1:]).sum(1)) + np.log((1 - rest) / rest)
    streams = tokens(logits, random, noise=(sigma, 0.0) if side == "engine" else (0.0, sigma))
    counts = {size: diagnoses(calibrations(streams, size, 40)) for size in (300, 640, 2000)}
    assert sum(map(alarms, counts.values())) <= 1, counts
