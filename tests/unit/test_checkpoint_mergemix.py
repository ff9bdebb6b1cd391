"""MergeMix: candidates against their formula, and their ranking against pandas and counted orders."""

import filecmp
import itertools
import json
import math
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from megatron_rl.checkpoint import mergemix
from megatron_rl.checkpoint.mergemix import MergeMixConfig, build, mixtures, soup_of
from megatron_rl.checkpoint.mergemix_rank import (
    agreement,
    average_ranks,
    permutation_p_value,
    rank_order,
    read_scores,
    spearman,
)
from megatron_rl.cli.main import app
from megatron_rl.config import ConfigError, DataError
from megatron_rl.config.load import load_config

HELPERS = runpy.run_path(str(Path(__file__).parents[1] / "hf_folders.py"))
write_folder, read_folder = HELPERS["write_folder"], HELPERS["read_folder"]
SCORES = st.lists(st.integers(0, 5).map(float), min_size=3, max_size=9)


def plan_of(tmp_path: Path, **changes: Any) -> MergeMixConfig:
    """A plan over a base and two made-up specialists, de and tools."""
    paths = {}
    for seed, name in enumerate(("base", "de", "tools")):
        tensors = {"w": torch.randn(5, 3, generator=torch.Generator().manual_seed(seed))}
        paths[name] = str(write_folder(tmp_path / name, tensors))
    base = paths.pop("base")
    return MergeMixConfig(**{"dir": str(tmp_path / "mix"), "base": base, "specialists": paths, **changes})


def plan_file(plan: MergeMixConfig, folder: Path) -> str:
    file = folder / "plan.yaml"
    file.write_text(plan.model_dump_json(exclude_none=True))
    return str(file)


@pytest.mark.parametrize(("clusters", "grid"), [(2, 4), (3, 4), (4, 2), (2, 1)])
def test_a_grid_is_every_mixture_in_equal_steps_once(clusters: int, grid: int) -> None:
    names = [f"c{number}_" for number in range(clusters)]
    plan = MergeMixConfig(dir="d", base="b", specialists=dict.fromkeys(names, "s"), grid=grid)
    found = [tuple(shares.values()) for shares in mixtures(plan).values()]
    steps = [step / grid for step in range(grid + 1)]
    expected = {mix for mix in itertools.product(steps, repeat=clusters) if math.isclose(sum(mix), 1)}
    assert len(found) == len(set(found)) == len(expected) == math.comb(grid + clusters - 1, clusters - 1)
    assert set(found) == expected


def test_candidates_are_the_base_and_shares_of_what_specialists_add(tmp_path: Path) -> None:
    """Against float64; less than 1 in all stays nearer to the base, more goes beyond the specialists."""
    candidates = {"near": {"de": 0.2, "tools": 0.3}, "beyond": {"de": 0.9, "tools": 0.8}, "one": {"tools": 0.25}}
    plan = plan_of(tmp_path, candidates=candidates)
    paths = build(plan)
    assert [path.name for path in paths] == list(candidates)
    base, de, tools = (read_folder(tmp_path / name)["w"].double() for name in ("base", "de", "tools"))
    for path in paths:
        shares = candidates[path.name]
        expected = base + shares.get("de", 0) * (de - base) + shares["tools"] * (tools - base)
        assert ((read_folder(path)["w"] - expected).abs() <= expected.abs() * 2**-24 + 2**-50).all()


def test_a_corner_of_the_grid_is_its_specialist_bit_by_bit(tmp_path: Path) -> None:
    build(plan_of(tmp_path, grid=2))
    for corner, name in (("de2-tools0", "de"), ("de0-tools2", "tools")):
        ours, theirs = (folder / "model.safetensors" for folder in (tmp_path / "mix" / corner, tmp_path / name))
        assert filecmp.cmp(ours, theirs, shallow=False)
    assert soup_of([0.01, 0.29, 0.7])[0] == 0, "the base is not read for a rounding"
    assert soup_of([0.5, 0.75]) == [-0.25, 0.5, 0.75]


def test_a_build_goes_on_with_what_is_missing(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, grid=2)
    (first,) = build(plan, only="de1-tools1")
    assert first == tmp_path / "mix" / "de1-tools1"
    before = first.stat().st_mtime_ns
    written = []
    paths = build(plan, on_written=lambda name, done, total: written.append((name, done, total)))
    assert [path.name for path in paths] == list(mixtures(plan)) and all(path.is_dir() for path in paths)
    assert written == [("de0-tools2", 60, 60), ("de2-tools0", 60, 60)]
    assert first.stat().st_mtime_ns == before
    build(plan_of(tmp_path, candidates={"hand": {"de": 0.5}}))
    with pytest.raises(ConfigError, match=r"mix was begun with another candidate de1-tools1; choose another dir"):
        build(plan_of(tmp_path, candidates={"de1-tools1": {"de": 0.4}}))
    with pytest.raises(ConfigError, match=r"mix was begun with another specialists"):
        build(plan.model_copy(update={"specialists": {"de": plan.base, "tools": plan.base}}))
    with pytest.raises(ConfigError, match="--only must name a candidate, got de9; there are de0-tools2, de1-tools1"):
        build(plan, only="de9")


def test_there_must_be_room_for_all_candidates_that_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = []
    monkeypatch.setattr(mergemix, "check_room", lambda _, num_bytes: needed.append(num_bytes))
    plan = plan_of(tmp_path, grid=2)
    build(plan, only="de1-tools1")
    build(plan)
    assert needed == [60, 2 * 60]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "a plan must have candidates, got none"),
        ({"candidates": {"x": {"fr": 1.0}}}, "candidates.x must name specialists, got fr; there are de, tools"),
        ({"candidates": {"x": {"de": -0.1}}}, r"candidates\.x\.de must be at least 0, got -0\.1"),
        ({"candidates": {"x": {"de": 0.0}}}, "candidates.x must have a share above 0, got only zeros"),
        ({"candidates": {"x": {"de": math.nan}}}, "candidates.x.de .*finite"),
        ({"candidates": {"a/b": {"de": 1.0}}}, "a name must be letters, digits, .* got 'a/b'"),
        ({"candidates": {"eval": {"de": 1.0}}}, "a name must be .* got 'eval'"),
        ({"grid": 0}, "grid"),
        ({"grid": 2, "specialists": {"de": "x"}}, "grid mixes two specialists or more, got one"),
        (
            {"grid": 4, "specialists": {f"c{number}": "x" for number in range(20)}},
            "at most 1,000 candidates, got 8,855 from 20 specialists at grid 4; make it coarser",
        ),
        ({"candidates": {"de1-tools0": {"de": 1.0}}, "grid": 1}, "names of their own, got de1-tools0, which grid"),
    ],
)
def test_plans_that_mean_nothing_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    tree = {"dir": str(tmp_path / "mix"), "base": "b", "specialists": {"de": "x", "tools": "y"}} | changes
    (tmp_path / "plan.yaml").write_text(json.dumps(tree).replace("NaN", ".nan"))
    with pytest.raises(ConfigError, match=message):
        mixtures(load_config(tmp_path / "plan.yaml", MergeMixConfig))


@given(st.data(), SCORES)
def test_rank_correlation_is_that_of_pandas_also_with_ties(data: st.DataObject, x: list[float]) -> None:
    y = data.draw(st.lists(st.integers(0, 5).map(float), min_size=len(x), max_size=len(x)))
    frame = pd.DataFrame({"x": x, "y": y})
    assert average_ranks(x).tolist() == frame["x"].rank().tolist()
    got, expected = spearman(x, y), frame.corr(method="spearman").loc["x", "y"]
    assert (got is None) == bool(np.isnan(expected))
    if got is not None:
        assert got == pytest.approx(expected, abs=1e-12)


def test_a_p_value_counts_orders() -> None:
    """Of 24 orders of four values two are as far from 0 as no swap; with ties, those that pandas finds as far.

    Every order of those ties is as far from 0, which a comparison without slack does not see.
    """
    assert permutation_p_value([1, 2, 3, 4], [1, 2, 3, 4]) == 2 / 24
    assert permutation_p_value([1, 2, 3, 4], [4, 3, 2, 1]) == 2 / 24
    x, y = [3.0, 0, 2, 4, 3], [3.0, 2, 3, 2, 4]
    frame = [
        pd.DataFrame({"x": x, "y": order}).corr(method="spearman").loc["x", "y"] for order in itertools.permutations(y)
    ]
    observed = pd.DataFrame({"x": x, "y": y}).corr(method="spearman").loc["x", "y"]
    assert permutation_p_value(x, y) == np.mean(np.abs(frame) >= abs(observed) - 1e-12) == 1
    assert permutation_p_value([1, 1, 1], [1, 2, 3]) is None


def test_random_orders_of_many_candidates_give_the_same_p_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within four standard errors of the count over all 5,040 orders."""
    x, y = [1.0, 2, 3, 4, 5, 6, 7], [2.0, 1, 4, 6, 3, 7, 5]
    exact = permutation_p_value(x, y)
    assert exact is not None
    monkeypatch.setattr("megatron_rl.checkpoint.mergemix_rank._EXACT_UP_TO", 3)
    sampled = permutation_p_value(x, y, seed=1)
    assert sampled is not None and sampled == permutation_p_value(x, y, seed=1)
    assert abs(sampled - exact) < 4 * math.sqrt(exact * (1 - exact) / 20_000)


def test_agreement_is_about_candidates_with_both_scores() -> None:
    merged = {"a": 0.5, "b": 0.4, "c": 0.3, "d": 0.9}
    assert agreement(merged, {"a": 0.1, "b": 0.2}) is None
    found = agreement(merged, {"a": 0.6, "b": 0.7, "c": 0.1})
    assert found is not None and (found.num_candidates, found.chosen, found.chosen_rank) == (3, "a", 2)
    assert found.spearman == pytest.approx(0.5) and found.loss == pytest.approx(0.1)
    assert rank_order({"a": 1.0, "b": 3.0, "c": 1.0}) == {"b": 1, "a": 2.5, "c": 2.5}


def test_scores_are_numbers_by_candidate_or_the_pass_rates_of_evaluations(tmp_path: Path) -> None:
    names = ["a", "b", "c"]
    for name, rates in (("a", [0.25, 0.75]), ("c", [0.125])):
        (tmp_path / "eval" / name).mkdir(parents=True)
        rows = [{"environment": "baker", "split": "x", "rate": rate} for rate in rates]
        (tmp_path / "eval" / name / "eval.json").write_text(json.dumps(rows))
    assert read_scores(tmp_path / "eval", names) == {"a": 0.5, "c": 0.125}
    file = tmp_path / "scores.json"
    file.write_text('{"a": 1, "b": 0.5}')
    assert read_scores(file, names) == {"a": 1.0, "b": 0.5}
    for text, message in (
        ('{"z": 1}', "z must be a candidate of the plan; there are a, b, c"),
        ('{"a": NaN}', "the score of a must be a finite number, got nan"),
        ('{"a": true}', "the score of a must be a finite number, got True"),
        ("[1]", "must be a JSON object of candidate and score, got list"),
        ("{", "must be JSON"),
    ):
        file.write_text(text)
        with pytest.raises(DataError, match=message):
            read_scores(file, names)
    file.write_text("{}")
    with pytest.raises(ConfigError, match="must be of candidates, got none; there are a, b, c"):
        read_scores(file, names)
    with pytest.raises(ConfigError, match=r"which is not there; evaluate candidates with megatron-rl eval"):
        read_scores(tmp_path / "none", names)


def test_the_ranking_names_best_ties_and_what_it_agrees_with(tmp_path: Path) -> None:
    plan = plan_file(plan_of(tmp_path, grid=3), tmp_path)
    merged, trained = tmp_path / "merged.json", tmp_path / "trained.json"
    merged.write_text('{"de0-tools3": 0.3, "de1-tools2": 0.5, "de2-tools1": 0.5}')
    trained.write_text('{"de0-tools3": 0.31, "de1-tools2": 0.6, "de2-tools1": 0.4}')
    result = CliRunner().invoke(app, ["mergemix", "rank", plan, "--merged", str(merged), "--trained", str(trained)])
    assert result.exit_code == 0, result.output
    table = [line.split() for line in result.stdout.splitlines()]
    assert table[0] == ["candidate", "de", "tools", "merged", "rank", "trained", "rank"]
    assert table[1] == ["de1-tools2", "0.3333", "0.6667", "0.5000", "1.5", "0.6000", "1"]
    assert table[3] == ["de0-tools3", "0", "1", "0.3000", "3", "0.3100", "3"]
    assert "without a score: de3-tools0" in result.stdout
    assert "Spearman 0.87 between merged and trained scores of 3 candidates" in result.stdout
    assert "best by merged score: de1-tools2, by trained score number 1 of 3, 0.0000 below" in result.stdout
    assert not result.stderr


def test_more_than_three_clusters_are_warned_of_with_the_reason(tmp_path: Path) -> None:
    for count, warned in ((3, False), (4, True)):
        base = plan_of(tmp_path, grid=1)
        clusters = {f"c{number}": base.base for number in range(count)}
        plan = base.model_copy(update={"specialists": clusters, "dir": str(tmp_path / f"mix{count}")})
        for verb in ("build", "rank"):
            scores = tmp_path / "scores.json"
            scores.write_text(json.dumps({next(iter(mixtures(plan))): 1.0}))
            options = ["--merged", str(scores)] if verb == "rank" else []
            result = CliRunner().invoke(app, ["mergemix", verb, plan_file(plan, tmp_path), *options])
            assert result.exit_code == 0, result.output
            assert result.stderr.startswith(f"warning: {count} clusters: ") == warned
            assert ("with 20 the rank correlation of merged and trained scores was -.09" in result.stderr) == warned


def test_the_example_is_a_plan() -> None:
    plan = load_config(Path(__file__).parents[2] / "examples" / "sft" / "mergemix_tiny.yaml", MergeMixConfig)
    assert list(mixtures(plan)) == ["a0-b4", "a1-b3", "a2-b2", "a3-b1", "a4-b0", "hand_set"]
