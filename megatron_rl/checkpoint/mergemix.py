"""MergeMix: data mixtures judged by merged specialists, before anyone trains on a mixture.

One specialist is fine-tuned per cluster of data. The candidate with shares alpha is base + sum alpha_k (specialist_k -
base): the soup of base and specialists with weights 1 - sum alpha and alpha. With few clusters such merges rank
mixtures as training on them does. Imports no Megatron.
"""

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from megatron_rl.checkpoint.soup import SoupDtype, check_room, num_bytes, soup, soup_layout
from megatron_rl.checkpoint.soup_member import open_members
from megatron_rl.config import ConfigError, ConfigModel

TRUSTED_CLUSTERS = 3
_MAX_CANDIDATES = 1000
PLAN_FILE, EVAL_FOLDER = "mergemix.json", "eval"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_ROUNDING = 1e-12
"""Shares are typed in decimals: a rest of 1 - sum that is smaller stands for none."""


class MergeMixConfig(ConfigModel):
    """Candidate mixtures and what they are merged from."""

    dir: str = Field(min_length=1)
    """Folder of the candidates, one Hugging Face folder each."""
    base: str = Field(min_length=1)
    """Hugging Face folder that every specialist was fine-tuned from; candidates have its tokenizer and config."""
    specialists: dict[str, str] = Field(min_length=1)
    """Name of a cluster of data -> Hugging Face folder of the model fine-tuned on it."""
    grid: int | None = Field(ge=1, default=None)
    """Candidates for all shares that are multiples of 1/grid and sum to 1, named like de1-tools3 at grid 4."""
    candidates: dict[str, dict[str, float]] = {}
    """Name of a candidate -> share of each cluster, 0 where not named. A sum under 1 stays nearer to the base, a sum
    over 1 goes beyond the specialists."""
    dtype: SoupDtype | None = None
    """Of the candidates; null: that of the checkpoints."""

    @model_validator(mode="after")
    def _is_a_plan(self) -> "MergeMixConfig":
        for name in (*self.specialists, *self.candidates):
            if not _NAME.fullmatch(name) or name in (EVAL_FOLDER, PLAN_FILE):
                raise ValueError(
                    f"a name must be letters, digits, _, . and -, and neither {EVAL_FOLDER} nor {PLAN_FILE}, got "
                    f"{name!r}; choose another"
                )
        if self.grid is None and not self.candidates:
            raise ValueError("a plan must have candidates, got none; add candidates, or grid: 4")
        if self.grid is not None:
            self._check_grid(self.grid, len(self.specialists))
        for name, shares in self.candidates.items():
            self._check_shares(name, shares)
        return self

    def _check_grid(self, grid: int, num_clusters: int) -> None:
        if num_clusters < 2:
            raise ValueError("grid mixes two specialists or more, got one; add specialists, or name candidates")
        if (count := math.comb(grid + num_clusters - 1, num_clusters - 1)) > _MAX_CANDIDATES:
            raise ValueError(
                f"grid must make at most {_MAX_CANDIDATES:,} candidates, got {count:,} from {num_clusters} specialists "
                f"at grid {grid}; make it coarser, or name candidates"
            )

    def _check_shares(self, name: str, shares: Mapping[str, float]) -> None:
        if unknown := sorted(shares.keys() - self.specialists.keys()):
            raise ValueError(
                f"candidates.{name} must name specialists, got {unknown[0]}; there are {', '.join(self.specialists)}"
            )
        if negative := [cluster for cluster, share in shares.items() if share < 0]:
            raise ValueError(
                f"candidates.{name}.{negative[0]} must be at least 0, got {shares[negative[0]]:g}: a mixture has no "
                "negative share; leave the cluster out"
            )
        if not any(shares.values()):
            raise ValueError(f"candidates.{name} must have a share above 0, got only zeros; that is the base itself")


def mixtures(plan: MergeMixConfig) -> dict[str, dict[str, float]]:
    """Candidate -> share of every cluster: those of the grid, then those named. ConfigError for a name given twice."""
    clusters, grid = list(plan.specialists), plan.grid or 0
    found = {}
    for parts in _compositions(grid, len(clusters)) if grid else ():
        name = "-".join(f"{cluster}{part}" for cluster, part in zip(clusters, parts, strict=True))
        found[name] = {cluster: part / grid for cluster, part in zip(clusters, parts, strict=True)}
    if twice := sorted(found.keys() & plan.candidates.keys()):
        raise ConfigError(f"candidates must have names of their own, got {twice[0]}, which grid makes; choose another")
    for name, shares in plan.candidates.items():
        found[name] = {cluster: shares.get(cluster, 0.0) for cluster in clusters}
    return found


def soup_of(shares: Sequence[float]) -> list[float]:
    """Weights of base and specialists that make base + sum shares_k (specialist_k - base)."""
    rest = 1 - math.fsum(shares)
    return [0.0 if abs(rest) < _ROUNDING else rest, *shares]


def build(
    plan: MergeMixConfig,
    *,
    only: str | None = None,
    on_written: Callable[[str, int, int], None] = lambda name, done, total: None,
) -> list[Path]:
    """Writes every candidate that is not there yet, or only that one; returns the folders of all of them.

    on_written gets the candidate, its bytes written and its bytes in all. ConfigError for a candidate that was built
    from something else, for an unknown name, and where the disk has no room for all; what soup raises otherwise.
    """
    wanted = mixtures(plan)
    if only is not None:
        if only not in wanted:
            raise ConfigError(f"--only must name a candidate, got {only}; there are {', '.join(wanted)}")
        wanted = {only: wanted[only]}
    folder = Path(plan.dir)
    check_plan(plan)
    sources = [Path(plan.base), *map(Path, plan.specialists.values())]
    missing = [name for name in wanted if not (folder / name).exists()]
    with ExitStack() as stack:
        layout = soup_layout(open_members(stack, sources), plan.dtype)
    check_room(folder / "candidate", len(missing) * num_bytes(layout))
    folder.mkdir(parents=True, exist_ok=True)
    _write_plan(plan)
    for name in missing:
        weights = soup_of(list(wanted[name].values()))

        def written(done: int, total: int, name: str = name) -> None:
            on_written(name, done, total)

        soup(sources, folder / name, weights=weights, dtype=plan.dtype, on_written=written)
    return [folder / name for name in wanted]


def check_plan(plan: MergeMixConfig) -> None:
    """ConfigError when candidates of plan.dir were built from other models or as other mixtures than plan says."""
    file = Path(plan.dir) / PLAN_FILE
    if not file.is_file():
        return
    try:
        recorded = json.loads(file.read_text(encoding="utf-8"))
        old_parts, old_mixtures = recorded["parts"], recorded["mixtures"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} must be what a build has written, got {error!r}; choose another dir") from error
    parts, now = _parts(plan), mixtures(plan)
    changed = [key for key in parts if parts[key] != old_parts.get(key)]
    changed += [f"candidate {name}" for name in now if name in old_mixtures and now[name] != old_mixtures[name]]
    if changed:
        raise ConfigError(
            f"dir {plan.dir} was begun with another {', '.join(changed)}; choose another dir, or remove this one"
        )


def cluster_warning(plan: MergeMixConfig) -> str | None:
    """Why a ranking by merges is not to be trusted, if there are too many clusters for it."""
    if len(plan.specialists) <= TRUSTED_CLUSTERS:
        return None
    return (
        f"{len(plan.specialists)} clusters: merges ranked mixtures as training did with two or three, but with 20 the "
        "rank correlation of merged and trained scores was -.09 (Kolibri, Aleph Alpha 2026); train some candidates and "
        "compare by --trained, or join clusters"
    )


def _parts(plan: MergeMixConfig) -> dict[str, Any]:
    return {"base": plan.base, "specialists": plan.specialists, "dtype": plan.dtype}


def _write_plan(plan: MergeMixConfig) -> None:
    """Candidates of earlier plans stay recorded."""
    file = Path(plan.dir) / PLAN_FILE
    before = json.loads(file.read_text(encoding="utf-8"))["mixtures"] if file.is_file() else {}
    record = {"parts": _parts(plan), "mixtures": before | mixtures(plan)}
    partial = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    partial.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    partial.replace(file)


def _compositions(total: int, count: int) -> Iterator[tuple[int, ...]]:
    """All ways to write total as a sum of count numbers of at least 0, in lexical order."""
    if count == 1:
        yield (total,)
        return
    for first in range(total + 1):
        for rest in _compositions(total - first, count - 1):
            yield first, *rest
