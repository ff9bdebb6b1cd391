"""Injected engine noise: the identity it keeps, the size it has, and what it depends on."""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.engine.records import Completion
from megatron_rl.loss.identity import identity_check
from megatron_rl.rollout.noise import NoisyGenerator, noisy_logp, with_noise

NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(80)
WEIGHTS = WEIGHTS / WEIGHTS.sum()
"""Expectation over a standard normal variable."""


def eta(sigma: float) -> np.ndarray:
    return sigma * (NODES + sigma / 2)


@given(st.floats(-50, 0), st.floats(0, 2))
def test_the_ratio_of_policy_to_engine_keeps_mean_one_for_every_confidence(logp: float, sigma: float) -> None:
    reported = noisy_logp(np.full(len(NODES), logp), eta(sigma))
    assert np.sum(WEIGHTS * np.exp(logp - reported)) == pytest.approx(1, abs=1e-9)


@given(st.floats(-700, 0), st.floats(-40, 40))
def test_no_reported_probability_exceeds_one(logp: float, shift: float) -> None:
    (reported,) = noisy_logp(np.array([logp]), np.array([shift]))
    assert reported <= 0 and np.isfinite(reported)
    assert (reported - logp) * shift >= -1e-12, "a higher logit is a higher probability"


def test_unusual_log_probs_pass_through() -> None:
    reported = noisy_logp(np.array([0.0, -np.inf, np.nan]), np.array([1.0, 1.0, 1.0]))
    np.testing.assert_array_equal(reported, [0.0, -np.inf, np.nan])


@pytest.mark.parametrize("probability", [0.05, 0.3, 0.7, 0.95])
def test_the_spread_is_sigma_times_one_minus_p(probability: float) -> None:
    sigma, logp = 0.05, np.log(probability)
    noise = noisy_logp(np.full(len(NODES), logp), eta(sigma)) - logp
    spread = np.sqrt(np.sum(WEIGHTS * noise**2) - np.sum(WEIGHTS * noise) ** 2)
    assert spread == pytest.approx(sigma * (1 - probability), rel=0.01)


@pytest.mark.parametrize("num_others", [1, 3, 400])
def test_one_logit_stands_for_noise_on_all_of_them_within_a_factor_of_two(num_others: int) -> None:
    """Against independent noise on every logit: right where the rest is spread thinly, half where one token has it."""
    sigma, probability, random = 0.02, 0.4, np.random.default_rng(0)
    logits = np.log(np.array([probability, *[(1 - probability) / num_others] * num_others]))
    noisy = logits + sigma * random.standard_normal((20_000, len(logits)))
    all_logits = np.var(noisy[:, 0] - np.log(np.exp(noisy).sum(1)))
    sum_of_squares = np.sum(np.exp(2 * logits))
    assert all_logits == pytest.approx(sigma**2 * (1 - 2 * probability + sum_of_squares), rel=0.05)
    one_logit = np.sum(WEIGHTS * (noisy_logp(np.full(len(NODES), logits[0]), eta(sigma)) - logits[0]) ** 2)
    assert 0.48 <= one_logit / all_logits <= 1.05
    if num_others == 400:
        assert one_logit == pytest.approx(all_logits, rel=0.05)


@pytest.mark.parametrize("sigma", [0.1, 0.5, 1.0])
def test_the_identity_check_takes_injected_noise_for_an_honest_engine(sigma: float) -> None:
    random = np.random.default_rng(0)
    logits = 3 * random.standard_normal((20_000, 64))
    logp = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    sampled = (logp + random.gumbel(size=logp.shape)).argmax(1)
    taken = np.take_along_axis(logp, sampled[:, None], 1)[:, 0]
    noise = sigma * (random.standard_normal(len(taken)) + sigma / 2)
    identity = identity_check(taken, noisy_logp(taken, noise), entropy=-(np.exp(logp) * logp).sum(1))
    assert identity.ok, identity.reason
    off = identity_check(taken, noisy_logp(taken, noise - sigma**2))
    assert not off.ok or sigma < 0.5, "noise of the wrong mean is found out once it is large"


class Engine:
    """Samples 32 tokens from a fixed distribution over four, by seed; the prompt's last token is the seed."""

    def __init__(self, version: int = 0) -> None:
        self.version = version

    async def generate(self, prompt_ids: Sequence[int], *, max_tokens: int, **_: Any) -> Completion:
        await asyncio.sleep(1e-4 * (prompt_ids[-1] % 3))
        probabilities = np.array([0.55, 0.25, 0.15, 0.05])
        ids = np.random.default_rng(prompt_ids[-1]).choice(4, size=max_tokens, p=probabilities)
        return Completion(
            token_ids=ids.astype(np.int32),
            logp=np.log(probabilities)[ids].astype(np.float32),
            weight_version=np.full(max_tokens, self.version, dtype=np.int32),
            finish_reason="length",
        )


def sample(seeds: Sequence[int], *, sigma: float = 0.7, seed: int = 3, version: int = 0) -> list[Any]:
    generator = with_noise(Engine(version), sigma=sigma, seed=seed)

    async def all_of_them() -> list[Any]:
        requests = [generator.generate([7, s], max_tokens=32, temperature=1.0, stop_token_ids=[9]) for s in seeds]
        return await asyncio.gather(*requests)

    return asyncio.run(all_of_them())


def test_sampled_tokens_keep_the_identity_within_four_standard_errors() -> None:
    clean = np.concatenate([turn.logp for turn in sample(range(2000), sigma=0.0)]).astype(np.float64)
    noisy = np.concatenate([turn.logp for turn in sample(range(2000))]).astype(np.float64)
    ratio = np.exp(clean - noisy)
    assert ratio.std() > 0.2
    assert abs(ratio.mean() - 1) < 4 * ratio.std() / np.sqrt(len(ratio))
    assert noisy.max() <= 0


def test_noise_depends_on_seed_prompt_tokens_and_weights_and_not_on_what_else_is_under_way() -> None:
    alone = sample([5])[0].logp
    np.testing.assert_array_equal(alone, sample([9, 5, 4, 1])[1].logp)
    assert not np.array_equal(alone, sample([5], seed=4)[0].logp)
    assert not np.array_equal(alone, sample([5], version=1)[0].logp)
    np.testing.assert_array_equal(sample([5])[0].token_ids, sample([5], sigma=0.0)[0].token_ids)


def test_without_noise_the_generator_is_the_engine_itself() -> None:
    engine = Engine()
    assert with_noise(engine, sigma=0.0, seed=0) is engine
    assert isinstance(with_noise(engine, sigma=0.1, seed=0), NoisyGenerator)
