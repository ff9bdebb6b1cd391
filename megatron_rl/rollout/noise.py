"""Engine noise on purpose, for studies of guards: what an engine reports is perturbed, what it samples is not.

The model: the logit of the taken token against the rest is off by eta ~ N(sigma^2/2, sigma^2), as if every logit of an
engine had noise of standard deviation sigma. With p the true probability, the reported one is
q = sigmoid(logit(p) + eta), so

    p / q = p + (1 - p) exp(-eta)      E[p / q] = 1 for every p and sigma, as E[exp(-eta)] = 1

The ratio of policy to engine thus keeps mean 1 over sampled tokens, as that of an honest engine does, and q <= 1. To
first order the variance of log q is sigma^2 (1-p)^2. Independent noise on all logits gives sigma^2 (1 - 2p + |p|^2);
only p of the taken token is known here, and |p|^2 is taken for p^2: right where the other tokens share their mass
thinly, too small by at most a factor of 2. Tails of real engines are heavier.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_rl.rollout.run import Generator, SampledTokens


def noisy_logp(logp: np.ndarray, eta: np.ndarray) -> np.ndarray:
    """log sigmoid(logit(exp(logp)) + eta), never above 0; NaN stays NaN. float64 [T]"""
    exact = np.asarray(logp, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):  # p = 1 leaves no rest; NaN is a missing log-prob
        log_rest = np.log(-np.expm1(exact))
        log_ratio = np.logaddexp(exact, log_rest - np.asarray(eta, dtype=np.float64))
    return np.minimum(exact - log_ratio, 0.0)


@dataclass(frozen=True)
class NoisyTokens:
    """One sampled turn with perturbed log-probs. Streams are [T]."""

    token_ids: np.ndarray
    logp: np.ndarray
    weight_version: np.ndarray
    finish_reason: str


class NoisyGenerator:
    """Passes on what a generator samples; its log-probs get noise that depends on seed, prompt and sampled tokens only.

    So it is the same whatever else is under way, and again after a restart; the same tokens sampled twice by the same
    weights have the same noise.
    """

    def __init__(self, generator: Generator, *, sigma: float, seed: int) -> None:
        self._generator, self._sigma, self._seed = generator, sigma, seed

    async def generate(
        self, prompt_ids: Sequence[int], *, max_tokens: int, temperature: float, stop_token_ids: Sequence[int]
    ) -> SampledTokens:
        """One completion; errors pass through."""
        sampled = await self._generator.generate(
            prompt_ids, max_tokens=max_tokens, temperature=temperature, stop_token_ids=stop_token_ids
        )
        normal = self._random(prompt_ids, sampled).standard_normal(len(sampled.token_ids))
        eta = self._sigma * (normal + self._sigma / 2)
        return NoisyTokens(
            token_ids=sampled.token_ids,
            logp=noisy_logp(sampled.logp, eta).astype(np.float32),
            weight_version=sampled.weight_version,
            finish_reason=sampled.finish_reason,
        )

    def _random(self, prompt_ids: Sequence[int], sampled: SampledTokens) -> np.random.Generator:
        digest = hashlib.blake2b(digest_size=16)
        for stream in ([self._seed, len(prompt_ids)], prompt_ids, sampled.token_ids, sampled.weight_version):
            digest.update(np.asarray(stream, dtype=np.int64).tobytes())
        return np.random.default_rng(int.from_bytes(digest.digest(), "little"))


def with_noise(generator: Generator, *, sigma: float, seed: int) -> Generator:
    """The generator itself for sigma 0."""
    return NoisyGenerator(generator, sigma=sigma, seed=seed) if sigma else generator
