"""Candidates of a MergeMix plan ranked by the scores of their merges, and what that says about training on them."""

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_rl.config import ConfigError, DataError

_EXACT_UP_TO = 8
"""Candidates for which every order is looked at: 8! = 40,320."""
_RANDOM_ORDERS = 20_000
_SLACK = 1e-9
"""Two correlations that differ by less are the same one, rounded otherwise."""


@dataclass(frozen=True)
class Agreement:
    """How merged scores order the candidates that were trained as well."""

    num_candidates: int
    spearman: float | None
    """Rank correlation; None where all scores on one side are equal."""
    p_value: float | None
    """Share of all orders of the candidates whose correlation is as far from 0: what chance alone would give."""
    chosen: str
    """Of the trained candidates, the one with the best merged score."""
    chosen_rank: float
    """Its rank by trained score; 1 is the best."""
    loss: float
    """Trained score of the best minus that of the chosen one."""


def read_scores(path: Path, candidates: Sequence[str]) -> dict[str, float]:
    """Candidate -> score, higher is better, of those that have one.

    path: a JSON object, or a folder with CANDIDATE/eval.json of megatron-rl eval, whose rates are averaged over
    environments and splits. ConfigError: no such path, no score in it. DataError: a name that is no candidate's, or a
    score that is not a finite number.
    """
    if path.is_dir():
        files = {name: path / name / "eval.json" for name in candidates}
        scores = {name: _mean_rate(file) for name, file in files.items() if file.is_file()}
    elif path.is_file():
        scores = _read_object(path, candidates)
    else:
        raise ConfigError(
            f"scores must be a JSON file or a folder with CANDIDATE/eval.json, got {path}, which is not there; "
            f"evaluate candidates with megatron-rl eval CONFIG model.path=DIR/CANDIDATE --out {path}/CANDIDATE"
        )
    if not scores:
        raise ConfigError(f"scores in {path} must be of candidates, got none; there are {', '.join(candidates)}")
    return scores


def rank_order(scores: Mapping[str, float]) -> dict[str, float]:
    """Candidate -> rank, best first; 1 is the highest score, equal scores share the mean of their ranks."""
    ranks = len(scores) + 1 - average_ranks(list(scores.values()))
    return dict(sorted(zip(scores, map(float, ranks), strict=True), key=lambda item: item[1]))


def agreement(merged: Mapping[str, float], trained: Mapping[str, float], *, seed: int = 0) -> Agreement | None:
    """Over the candidates that have both scores; None for fewer than three, which any two lists order alike or not."""
    common = [name for name in merged if name in trained]
    if len(common) < 3:
        return None
    x, y = [merged[name] for name in common], [trained[name] for name in common]
    chosen = max(common, key=lambda name: merged[name])
    of_common = {name: trained[name] for name in common}
    return Agreement(
        num_candidates=len(common),
        spearman=spearman(x, y),
        p_value=permutation_p_value(x, y, seed=seed),
        chosen=chosen,
        chosen_rank=rank_order(of_common)[chosen],
        loss=max(of_common.values()) - of_common[chosen],
    )


def average_ranks(values: Sequence[float]) -> NDArray[np.float64]:
    """1 for the lowest; equal values share the mean of the ranks they take together."""
    _, places, counts = np.unique(np.asarray(values, dtype=np.float64), return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[places]


def spearman(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Pearson correlation of average ranks; None where all values on one side are equal."""
    if len(set(x)) < 2 or len(set(y)) < 2:
        return None
    return float(_centred(x) @ _centred(y))


def permutation_p_value(x: Sequence[float], y: Sequence[float], *, seed: int = 0) -> float | None:
    """Two-sided: over all orders of y up to eight values, else over random ones with this order counted as one."""
    if (observed := spearman(x, y)) is None:
        return None
    ranks_x, ranks_y = _centred(x), _centred(y)
    if len(x) <= _EXACT_UP_TO:
        orders = np.array(list(itertools.permutations(range(len(x)))))
        return float(np.mean(np.abs(ranks_y[orders] @ ranks_x) >= abs(observed) - _SLACK))
    generator = np.random.default_rng(seed)
    orders = generator.permuted(np.tile(ranks_y, (_RANDOM_ORDERS, 1)), axis=1)
    as_far = int(np.sum(np.abs(orders @ ranks_x) >= abs(observed) - _SLACK))
    return (as_far + 1) / (_RANDOM_ORDERS + 1)


def _centred(values: Sequence[float]) -> NDArray[np.float64]:
    """Ranks with mean 0 and length 1."""
    ranks = average_ranks(values)
    ranks = ranks - ranks.mean()
    return ranks / np.linalg.norm(ranks)


def _read_object(path: Path, candidates: Sequence[str]) -> dict[str, float]:
    tree = _read_json(path)
    if not isinstance(tree, dict):
        raise DataError(f"{path} must be a JSON object of candidate and score, got {type(tree).__name__}; mend it")
    for name, score in tree.items():
        if name not in candidates:
            raise DataError(f"{path}: {name} must be a candidate of the plan; there are {', '.join(candidates)}")
        if isinstance(score, bool) or not isinstance(score, int | float) or not math.isfinite(score):
            raise DataError(
                f"{path}: the score of {name} must be a finite number, got {score!r}; leave it out or mend it"
            )
    return {name: float(score) for name, score in tree.items()}


def _mean_rate(path: Path) -> float:
    rows = _read_json(path)
    try:
        rates = [float(row["rate"]) for row in rows]
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path} must be what megatron-rl eval writes, got {error!r}; evaluate again") from error
    if not rates or not all(map(math.isfinite, rates)):
        raise DataError(f"{path} must hold pass rates, got {rates}; evaluate again")
    return math.fsum(rates) / len(rates)


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path} must be JSON, got: {error}; mend it") from error
