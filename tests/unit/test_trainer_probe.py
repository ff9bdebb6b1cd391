"""The check after every weight update, against engines whose answers are known."""

from collections.abc import Sequence

import numpy as np
import pytest

from megatron_rl.trainer.probe import NEAR_TIE, WeightProbe, WeightProbeError


class Bytes:
    """One token per byte."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(text.encode())


class Engine:
    """Log-prob -id/100 for every token, plus what is added from some token of some text (None: of each) on."""

    url = "http://engine"

    def __init__(self, text: int | None = 0, token: int = 0, added: float = 0.0) -> None:
        self.text, self.token, self.added = text, token, added
        self.calls = 0

    def prompt_logprobs(self, token_ids: Sequence[int]) -> np.ndarray:
        logp = np.array([np.nan, *(-t / 100 for t in token_ids[1:])], dtype=np.float32)
        if self.text is None or list(token_ids) == PROBE.texts[self.text]:
            logp[self.token :] += self.added
        self.calls += 1
        return logp


PROBE = WeightProbe(Bytes(), pad_multiple=4)
POLICY = -PROBE.batch.target_ids.astype(np.float32) / 100
SURE = np.full(PROBE.batch.num_tokens, 1.0, dtype=np.float32)


def check(engine: Engine, margin: np.ndarray | None = SURE):
    return PROBE.check([engine], POLICY, margin, version=3, tolerance=1e-4)


def margin_with_tie(text: int, token: int) -> np.ndarray:
    """A near tie at the position that predicts this token of this text."""
    margin = SURE.copy()
    document = PROBE.batch.sample_ids.index(str(text))
    margin[PROBE.batch.cu_seqlens[document] + token - 1] = NEAR_TIE / 2
    return margin


def test_an_engine_that_agrees_passes_and_padding_does_not_count() -> None:
    assert PROBE.batch.num_padding or PROBE.batch.num_tokens % 4 == 0
    result = check(Engine())
    assert result.max_error <= 1e-6 and result.num_excused == 0


@pytest.mark.parametrize("added", [2e-4, -2e-4, float("nan")])
def test_one_wrong_token_in_one_text_stops_the_run(added: float) -> None:
    with pytest.raises(WeightProbeError, match=r"version 3.*http://engine.*probe_tolerance"):
        check(Engine(text=5, token=len(PROBE.texts[5]) - 1, added=added))


def test_what_follows_a_near_tie_in_a_text_does_not_count_and_is_reported() -> None:
    result = check(Engine(text=2, token=7, added=0.5), margin_with_tie(2, 7))
    assert result.num_excused == len(PROBE.texts[2]) - 7 and result.max_error <= 1e-6


def test_a_difference_before_the_tie_or_in_another_text_still_stops_the_run() -> None:
    for text, token in ((2, 6), (3, 7)):
        with pytest.raises(WeightProbeError):
            check(Engine(text=text, token=token, added=0.5), margin_with_tie(2, 7))


def test_when_ties_would_excuse_most_tokens_every_token_counts() -> None:
    with pytest.raises(WeightProbeError):
        check(Engine(text=2, token=7, added=0.5), np.zeros_like(SURE))


def test_in_low_precision_the_median_token_decides_and_the_others_are_reported() -> None:
    result = check(Engine(text=2, token=7, added=0.5), None)
    assert result.num_excused == len(PROBE.texts[2]) - 7
    assert result.max_error == pytest.approx(0.5, abs=1e-6)
    with pytest.raises(WeightProbeError, match=r"difference of 0\.0002"):
        check(Engine(text=None, added=2e-4), None)


def test_in_low_precision_one_missing_number_stops_the_run() -> None:
    with pytest.raises(WeightProbeError):
        check(Engine(text=2, token=7, added=float("nan")), None)
