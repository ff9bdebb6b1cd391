"""The identity check: passes what an honest sampler gives, and names what is wrong with one that is not.

Every stream here is sampled: random logits, a real softmax, Gumbel draws from what the sampler really uses.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pytest
import torch

from megatron_rl.config import RunError
from megatron_rl.loss.identity import identity_check, mean_one, require_identity
from megatron_rl.loss.ratio_streams import Ratios, Streams
from megatron_rl.loss.temperature import relative_temperature
from megatron_rl.telemetry.snr_log import Identity

VOCABULARY = 32
TOKENS = 4000
DTYPES = pytest.mark.parametrize("dtype", [np.float64, np.float32], ids=str)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits - logits.max(1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(1, keepdims=True))


@dataclass(frozen=True)
class Sampler:
    """What the engine does; logits are those of the trainer plus noise of standard deviation sigma."""

    temperature: float = 1.0
    top_p: float | None = None
    top_k: int | None = None
    sigma: float = 0.01
    heavy: bool = False
    reports_raw: bool = False
    """Log-probs from before temperature and truncation, as engines do by default."""

    def logits(self, logits: np.ndarray, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """(what it samples from, what it reports)."""
        scale = np.sqrt(1.5 / random.gamma(1.5, size=(len(logits), 1))) if self.heavy else 1.0
        noisy = logits + self.sigma * scale * random.standard_normal(logits.shape)
        tempered = noisy / self.temperature
        order = np.argsort(-tempered, 1)
        p = np.exp(np.take_along_axis(log_softmax(tempered), order, 1))
        kept = np.ones_like(p, dtype=bool)
        if self.top_p is not None:
            kept &= p.cumsum(1) - p < self.top_p
        if self.top_k is not None:
            kept[:, self.top_k :] = False
        mask = np.empty_like(kept)
        np.put_along_axis(mask, order, kept, 1)
        sampled = np.where(mask, tempered, -np.inf)
        return sampled, noisy if self.reports_raw else sampled


@lru_cache
def sampled(sampler: Sampler, trainer_temperature: float, seed: int, moved: float) -> tuple[np.ndarray, ...]:
    """(policy log-prob, engine log-prob, entropy of the policy) of sampled tokens; float64 [TOKENS], shared."""
    random = np.random.default_rng(seed)
    logits = random.gamma(2.0, 1.5, size=(TOKENS, 1)) * random.standard_normal((TOKENS, VOCABULARY))
    used, reported = sampler.logits(logits, random)
    taken = np.argmax(used + random.gumbel(size=used.shape), 1)
    policy = log_softmax((logits + moved * random.standard_normal(logits.shape)) / trainer_temperature)
    everyone = np.arange(TOKENS)
    entropy = -(np.exp(policy) * policy).sum(1)
    return policy[everyone, taken], log_softmax(reported)[everyone, taken], entropy


def sample(
    sampler: Sampler,
    *,
    trainer_temperature: float = 1.0,
    seed: int = 0,
    moved: float = 0.0,
    dtype: type[np.floating] = np.float64,
) -> Streams:
    """Streams of tokens from contexts between certain and undecided; moved: how far the policy's logits have gone."""
    return Streams(*(stream.astype(dtype) for stream in sampled(sampler, trainer_temperature, seed, moved)))


def check(streams: Streams, *, with_entropy: bool = True, same_weights: bool = True) -> Identity:
    entropy = streams.entropy if with_entropy else None
    return identity_check(streams.policy_logp, streams.engine_logp, entropy=entropy, same_weights=same_weights)


@DTYPES
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("sigma", "heavy"), [(0.0, False), (0.001, False), (0.1, True), (0.3, True), (0.6, False)])
def test_an_honest_sampler_passes_however_noisy_its_log_probs_are(
    sigma: float, heavy: bool, seed: int, dtype: type[np.floating]
) -> None:
    sampler = Sampler(temperature=0.8, sigma=sigma, heavy=heavy)
    identity = check(sample(sampler, trainer_temperature=0.8, seed=seed, dtype=dtype))
    assert identity.ok and identity.diagnosis == "ok" and identity.cure == "" and identity.missing == 0, identity
    require_identity(identity)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("moved", [0.1, 0.5])
def test_the_mean_ratio_stays_one_when_the_policy_has_moved(moved: float, seed: int) -> None:
    identity = check(sample(Sampler(), moved=moved, seed=seed), same_weights=False)
    assert identity.ok, identity


@DTYPES
@pytest.mark.parametrize("temperature", [0.5, 0.7, 0.9, 1.3])
def test_a_temperature_that_the_trainer_forgot_is_named(temperature: float, dtype: type[np.floating]) -> None:
    streams = sample(Sampler(temperature=temperature), dtype=dtype)
    assert check(streams, with_entropy=False).ok, "the mean is 1, and honest noise follows log p as well"
    identity = check(streams)
    assert not identity.ok and identity.diagnosis == "temperature", identity
    assert "divide the trainer's logits by rollout.temperature" in identity.cure
    found = float(identity.reason.split("about ")[1].split(" times")[0])
    assert found == pytest.approx(temperature, rel=0.12)


@pytest.mark.parametrize("temperature", [0.2, 0.3, 2.5])
def test_a_far_temperature_is_named_with_the_help_of_the_entropy(temperature: float) -> None:
    for seed in range(12):
        identity = check(sample(Sampler(temperature=temperature), seed=seed))
        assert identity.diagnosis == "temperature" and "divide the trainer's logits" in identity.cure, (seed, identity)


def test_a_weak_trend_under_strong_noise_is_no_temperature() -> None:
    random = np.random.default_rng(0)
    engine = -random.gamma(2.0, 2.0, 50_000) - 5
    for trend, found in ((0.01, False), (0.2, True)):
        log_ratio = trend * (engine - engine.mean()) + 0.5 * random.standard_normal(len(engine))
        assert (relative_temperature(Ratios(engine + log_ratio, engine)) is not None) == found


@pytest.mark.parametrize(("on_policy", "on_engine"), [(0.3, 0.3), (0.4, 1.0), (0.0, 1.0), (1.0, 0.0), (0.0, 0.05)])
def test_noise_on_either_side_or_both_is_no_temperature(on_policy: float, on_engine: float) -> None:
    for seed in range(20):
        random = np.random.default_rng(seed)
        true = random.normal(-8, 1, 3000)
        noises = (size * random.standard_normal(len(true)) for size in (on_policy, on_engine))
        policy, engine = (true + noise for noise in noises)
        assert relative_temperature(Ratios(policy, engine)) is None


@DTYPES
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_a_temperature_that_the_engine_does_not_report_is_named(
    temperature: float, with_entropy: bool, dtype: type[np.floating]
) -> None:
    sampler = Sampler(temperature=temperature, reports_raw=True)
    identity = check(sample(sampler, trainer_temperature=temperature, dtype=dtype), with_entropy=with_entropy)
    assert not identity.ok and identity.diagnosis == "temperature", identity
    assert "report processed log-probs" in identity.cure and identity.mean_ratio is not None and identity.mean_ratio > 1


@DTYPES
@pytest.mark.parametrize("same_weights", [False, True])
@pytest.mark.parametrize(
    "sampler",
    [Sampler(top_p=0.5), Sampler(top_p=0.9), Sampler(top_p=0.99), Sampler(top_k=3), Sampler(top_p=0.9, sigma=0.1)],
    ids=str,
)
def test_truncation_on_the_samplers_side_alone_is_named(
    sampler: Sampler, same_weights: bool, dtype: type[np.floating]
) -> None:
    identity = check(sample(sampler, dtype=dtype), same_weights=same_weights)
    assert not identity.ok and identity.diagnosis == "truncated", identity
    assert "top-p, top-k, min-p" in identity.cure and identity.mean_ratio is not None and identity.mean_ratio < 1


def test_the_mean_ratio_of_a_truncated_sampler_is_the_mass_it_can_reach() -> None:
    random = np.random.default_rng(0)
    logits = random.standard_normal((1, VOCABULARY)).repeat(20_000, 0)
    p = np.sort(np.exp(log_softmax(logits[:1])[0]))[::-1]
    streams = Sampler(top_k=5, sigma=0.0)
    sampled, reported = streams.logits(logits, random)
    taken = np.argmax(sampled + random.gumbel(size=sampled.shape), 1)
    everyone = np.arange(len(taken))
    identity = identity_check(log_softmax(logits)[everyone, taken], log_softmax(reported)[everyone, taken])
    assert identity.mean_ratio == pytest.approx(p[:5].sum(), rel=1e-12) and identity.diagnosis == "truncated"


@DTYPES
@pytest.mark.parametrize("placeholder", [math.nan, -math.inf, 0.0])
@pytest.mark.parametrize("share", [0.03, 0.5, 1.0])
def test_missing_log_probs_are_named(placeholder: float, share: float, dtype: type[np.floating]) -> None:
    streams = sample(Sampler(), dtype=dtype)
    engine = np.array(streams.engine_logp)
    engine[np.random.default_rng(1).random(len(engine)) < share] = placeholder
    identity = identity_check(streams.policy_logp, engine)
    assert not identity.ok and identity.diagnosis == "missing", identity
    assert "ask the engine for the log-prob of every sampled token" in identity.cure
    assert 0.5 * share < identity.missing <= 1


def test_few_missing_log_probs_are_let_pass_and_counted() -> None:
    streams = sample(Sampler())
    engine = np.array(streams.engine_logp)
    engine[:20] = math.nan
    identity = identity_check(streams.policy_logp, engine, entropy=streams.entropy)
    assert identity.ok and identity.missing == 0.005 and identity.tokens == 3980


def test_log_probs_of_zero_are_honest_where_truncation_leaves_one_token() -> None:
    streams = sample(Sampler(top_p=0.3, sigma=0.0))
    assert (np.asarray(streams.engine_logp) == 0).mean() > 0.2
    assert check(streams).diagnosis == "truncated"


@pytest.mark.parametrize(
    "sampler", [Sampler(temperature=0.7, reports_raw=True), Sampler(top_p=0.8, reports_raw=True)], ids=str
)
def test_a_sampler_that_neither_side_reports_shows_only_against_the_entropy(sampler: Sampler) -> None:
    streams = sample(sampler)
    assert check(streams, with_entropy=False).ok, "the ratio cannot know"
    identity = check(streams)
    assert not identity.ok and identity.diagnosis == "sampler", identity
    assert "below the entropy" in identity.reason and "sharper" in identity.cure


@pytest.mark.parametrize("certainty", [0.9, 0.99, 0.999])
@pytest.mark.parametrize("tokens", [60, 300, 3000])
def test_a_policy_that_is_nearly_certain_passes_whether_or_not_it_has_surprised(certainty: float, tokens: int) -> None:
    entropy = np.full(tokens, -certainty * math.log(certainty) - (1 - certainty) * math.log1p(-certainty))
    for seed in range(100):
        likely = np.random.default_rng(seed).random(tokens) < certainty
        logp = np.where(likely, math.log(certainty), math.log1p(-certainty))
        assert identity_check(logp, logp, entropy=entropy).ok, seed


@pytest.mark.parametrize(("bias", "spread"), [(0.05, 0.05), (0.2, 0.05), (-0.1, 0.3)])
def test_noise_with_a_bias_is_told_from_the_known_causes(bias: float, spread: float) -> None:
    streams = sample(Sampler(sigma=0.0))
    policy = np.asarray(streams.policy_logp)
    noise = np.random.default_rng(1).normal(bias, spread, len(policy))
    engine = policy - 2 - noise
    identity = identity_check(policy - 2, engine, entropy=streams.entropy)
    assert not identity.ok and identity.diagnosis == "other" and "compare both sides on one text" in identity.cure


def test_a_sharper_policy_is_no_fault_of_live_tokens() -> None:
    streams = sample(Sampler(temperature=1.25, sigma=0.0))
    assert not check(streams).ok and check(streams, same_weights=False).ok


def test_rounding_that_follows_log_p_is_no_temperature() -> None:
    streams = sample(Sampler(sigma=0.0))
    policy = np.asarray(streams.policy_logp)
    assert identity_check(policy, np.minimum(policy * (1 + 1e-6), 0)).ok


@pytest.mark.parametrize("sigma", [0.5, 1.0, 1.5])
def test_log_normal_ratios_with_mean_one_pass(sigma: float) -> None:
    for seed in range(40):
        noise = np.random.default_rng(seed).normal(-(sigma**2) / 2, sigma, 2000)
        assert mean_one(noise).side == 0, (sigma, seed)


def test_a_mean_that_misses_one_in_an_unseen_tail_passes_more_often_than_by_its_standard_error() -> None:
    plain, allowed = 0, 0
    for seed in range(200):
        mean = mean_one(np.random.default_rng(seed).normal(-2.0, 2.0, 400))
        plain += abs(mean.z) > 4
        allowed += mean.side != 0
    assert plain > 4 * max(1, allowed), (plain, allowed)


def test_the_mean_its_error_and_z_are_those_of_the_ratios() -> None:
    mean = mean_one(np.log([0.5, 1.0, 1.5, 2.0]))
    error = math.sqrt((0.75**2 + 0.25**2 + 0.25**2 + 0.75**2) / 3 / 4)
    assert (mean.mean, mean.error, mean.z) == pytest.approx((1.25, error, 0.25 / error))
    assert mean_one(np.full(10, 800.0)).mean > 1e300, "no overflow"


def test_require_identity_stops_with_reason_and_cure_in_one_line() -> None:
    identity = check(sample(Sampler(temperature=0.7)))
    with pytest.raises(RunError, match=r"log-probs must be .*0\.7.*\(over 4000 tokens\); divide the") as error:
        require_identity(identity)
    assert "\n" not in str(error.value)


def test_tensors_of_any_kind_are_streams() -> None:
    streams = sample(Sampler(sigma=0.1), dtype=np.float32)
    tensors = [torch.tensor(stream, requires_grad=True) for stream in (streams.policy_logp, streams.engine_logp)]
    assert identity_check(*tensors) == identity_check(streams.policy_logp, streams.engine_logp)


@pytest.mark.parametrize(
    ("policy", "engine", "message"),
    [
        ([-1.0, math.nan], [-1.0, -1.0], r"policy_logp must be a log-prob, .* got nan at position 1"),
        ([-1.0, 0.5], [-1.0, -1.0], r"policy_logp must be a log-prob, .* got 0\.5 at position 1"),
        ([-1.0, -math.inf], [-1.0, -1.0], r"policy_logp must be a log-prob"),
        ([-1.0], [0.3], r"engine_logp must be a log-prob, .* got 0\.3 at position 0"),
        ([-1.0, -1.0], [-1.0], r"two streams \[T\] of one length, got \[2\] and \[1\]"),
        ([[-1.0]], [[-1.0]], r"two streams \[T\] of one length"),
        ([], [], "needs sampled tokens, got none"),
    ],
)
def test_broken_streams_are_refused(policy: list[float], engine: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        identity_check(policy, engine)


def test_an_entropy_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match=r"entropy must be aligned with policy_logp \[2\], got \[3\]"):
        identity_check([-1.0, -1.0], [-1.0, -1.0], entropy=[1.0, 1.0, 1.0])
