"""The order of a mixture: what each pass holds, that a draw number alone decides, and the quotas."""

import itertools
import json
import tracemalloc
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from megatron_rl.config import ConfigError, DataError
from megatron_rl.config.load import load_config
from megatron_rl.config.model import ConfigModel
from megatron_rl.data import mixture as mixture_module
from megatron_rl.data.dataset_config import DatasetConfig, check_mixture
from megatron_rl.data.mixture import Mixture, largest_remainder, pass_quotas


class Numbers:
    """Rows that are nothing but their number; the path says how many, as in `12`."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def __len__(self) -> int:
        return int(self.path.name)

    def source(self, index: int) -> str:
        return f"{self.path}[{index}]"

    def row(self, index: int) -> dict[str, Any]:
        return {"index": index}

    def identity(self) -> str:
        return self.path.name


@pytest.fixture(scope="module", autouse=True)
def _numbers() -> Any:
    """Paths that are numbers stand for so many rows; others are opened as ever."""
    really = mixture_module.open_rows
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            mixture_module, "open_rows", lambda path: Numbers(path) if Path(path).name.isdecimal() else really(path)
        )
        yield


def mixed(*datasets: dict[str, Any], seed: int = 3) -> Mixture:
    """count=n and weight or epochs of each dataset; names are letters."""
    configs = [
        DatasetConfig(path=str(one["count"]), name=chr(ord("a") + i), **{k: v for k, v in one.items() if k != "count"})
        for i, one in enumerate(datasets)
    ]
    return Mixture(configs, seed=seed)


counts = st.integers(1, 9)
by_epochs = st.lists(st.fixed_dictionaries({"count": counts, "epochs": st.integers(1, 4)}), min_size=1, max_size=4)
by_fraction = st.lists(
    st.fixed_dictionaries({"count": st.integers(2, 9), "epochs": st.floats(0.5, 3)}), min_size=1, max_size=4
)
by_weight = st.lists(
    st.fixed_dictionaries({"count": st.integers(4, 9), "weight": st.floats(1, 4)}), min_size=1, max_size=4
)
mixtures = by_epochs | by_fraction | by_weight


def drawn(mixture: Mixture, start: int, end: int) -> Counter[tuple[int, int]]:
    return Counter(mixture.locate(draw) for draw in range(start, end))


@settings(deadline=None)
@given(by_epochs, st.integers(0, 2**70), st.integers(0, 5))
def test_every_row_occurs_exactly_epochs_times_in_every_pass(
    datasets: list[dict[str, Any]], seed: int, number: int
) -> None:
    mixture = mixed(*datasets, seed=seed)
    length = sum(one["count"] * one["epochs"] for one in datasets)
    assert (mixture.pass_length, mixture.num_rows) == (length, sum(one["count"] for one in datasets))
    expected = {(i, row): one["epochs"] for i, one in enumerate(datasets) for row in range(one["count"])}
    assert drawn(mixture, number * length, (number + 1) * length) == expected


@settings(deadline=None)
@given(mixtures, st.integers(0, 200))
def test_no_row_is_drawn_again_before_every_other_row_of_its_dataset(datasets: list[dict[str, Any]], end: int) -> None:
    mixture = mixed(*datasets)
    times = drawn(mixture, 0, end)
    for i, one in enumerate(datasets):
        of_rows = [times[i, row] for row in range(one["count"])]
        assert max(of_rows) - min(of_rows) <= 1
        assert set(times) <= {(i, row) for i, one in enumerate(datasets) for row in range(one["count"])}


@settings(deadline=None)
@given(mixtures, st.integers(0, 4))
def test_every_pass_draws_the_quotas(datasets: list[dict[str, Any]], number: int) -> None:
    mixture = mixed(*datasets)
    length = mixture.pass_length
    of_dataset = Counter(mixture.locate(draw)[0] for draw in range(number * length, (number + 1) * length))
    assert [of_dataset[i] for i in range(len(datasets))] == mixture.quotas
    if "epochs" in datasets[0]:
        assert mixture.quotas == [round(one["epochs"] * one["count"]) for one in datasets]
    else:
        assert length == mixture.num_rows


@settings(max_examples=40, deadline=None)
@given(mixtures, st.integers(1, 4), st.randoms(use_true_random=False))
def test_shards_are_a_partition_whatever_each_rank_was_asked_before(
    datasets: list[dict[str, Any]], num_ranks: int, random: Any
) -> None:
    end = 2 * mixed(*datasets).pass_length
    whole = [mixed(*datasets).locate(draw) for draw in range(end)]
    sharded: dict[int, tuple[int, int]] = {}
    for rank in range(num_ranks):
        own, mixture = list(range(rank, end, num_ranks)), mixed(*datasets)
        random.shuffle(own)
        sharded |= {draw: mixture.locate(draw) for draw in own}
        found = mixture.locate_many(np.array(own, dtype=np.int64))
        assert list(zip(*map(np.ndarray.tolist, found), strict=True)) == [whole[draw] for draw in own]
    assert [sharded[draw] for draw in range(end)] == whole


def test_the_order_is_the_documented_one() -> None:
    """Spelled out from the formula, so that a run of today can be resumed by the code of tomorrow."""
    mixture, counts, quotas = mixed({"count": 4, "epochs": 1.5}, {"count": 3, "epochs": 2}, seed=11), [4, 3], [6, 6]

    def generator(*key: int) -> np.random.Generator:
        return np.random.default_rng(np.random.SeedSequence(11, spawn_key=key))

    drawn_before = [0, 0]
    expected = []
    for number in range(3):
        for dataset in generator(0, number).permutation([0] * quotas[0] + [1] * quotas[1]).tolist():
            cycle, place = divmod(drawn_before[dataset], counts[dataset])
            expected.append((dataset, int(generator(1, dataset, cycle).permutation(counts[dataset])[place])))
            drawn_before[dataset] += 1
    assert [mixture.locate(draw) for draw in range(36)] == expected
    assert expected[:6] == [(0, 1), (1, 1), (0, 3), (1, 2), (0, 2), (1, 0)], (
        "numpy draws other numbers: runs cannot resume"
    )


def test_passes_seeds_and_datasets_of_one_size_have_different_orders() -> None:
    def order(mixture: Mixture, dataset: int, number: int) -> list[int]:
        length = mixture.pass_length
        found = map(mixture.locate, range(number * length, (number + 1) * length))
        return [row for i, row in found if i == dataset]

    one, other = mixed({"count": 40}, {"count": 40}), mixed({"count": 40}, {"count": 40}, seed=4)
    orders = [order(m, dataset, number) for m in (one, other) for dataset in (0, 1) for number in (0, 1)]
    assert all(sorted(order) == list(range(40)) for order in orders)
    assert all(a != b for a, b in itertools.combinations([list(range(40)), *orders], 2))
    heads = [[m.locate(start + draw)[0] for draw in range(80)] for m in (one, other) for start in (0, 80)]
    assert all(a != b for a, b in itertools.combinations(heads, 2)), "the datasets take turns in another order"


def test_datasets_are_mixed_evenly_over_a_pass() -> None:
    mixture = mixed({"count": 2000, "weight": 3}, {"count": 2000, "weight": 1})
    datasets, _ = mixture.locate_many(np.arange(4000))
    for quarter in np.split(datasets, 4):
        assert abs(int(quarter.sum()) - 250) < 6 * np.sqrt(1000 * 3 / 16), "six standard deviations"


@settings(deadline=None)
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=6).filter(any), st.integers(0, 10**9))
def test_largest_remainder_shares_add_up_and_round_the_largest_remainders_up(weights: list[float], total: int) -> None:
    shares = largest_remainder(weights, total)
    assert sum(shares) == total
    exact = [total * Fraction(weight) / sum(map(Fraction, weights)) for weight in weights]
    up = [exact[i] % 1 for i in range(len(weights)) if shares[i] == exact[i] // 1 + 1]
    down = [exact[i] % 1 for i in range(len(weights)) if shares[i] == exact[i] // 1]
    assert len(up) + len(down) == len(weights)
    assert min(up, default=1) >= max(down, default=0) and 0 not in up


def test_quotas_of_a_case_worked_out_by_hand() -> None:
    """10 rows at 1 : 1 : 2 : 3 are 1.43, 1.43, 2.86, 4.29: two to give, to .86 and to the first .43."""
    assert largest_remainder([1, 1, 2, 3], 10) == [2, 1, 3, 4]
    configs = [DatasetConfig(path="a", weight=1), DatasetConfig(path="b", weight=0)]
    assert pass_quotas(configs, [3, 4]) == [7, 0], "weight 0 turns a dataset off"


def test_identity_follows_seed_contents_and_quotas_and_no_name() -> None:
    def identity(*datasets: tuple[str, str, float], seed: int = 0) -> dict[str, Any]:
        return Mixture([DatasetConfig(path=p, name=n, epochs=e) for p, n, e in datasets], seed=seed).identity()

    first = identity(("5", "a", 1), ("6", "b", 1))
    assert first == identity(("elsewhere/5", "c", 1), ("6", "d", 1))
    others = [
        identity(("5", "a", 1), ("6", "b", 1), seed=1),
        identity(("5", "a", 2), ("6", "b", 1)),
        identity(("6", "b", 1), ("5", "a", 1)),
        identity(("5", "a", 1), ("7", "b", 1)),
    ]
    assert first not in others
    assert json.loads(json.dumps(first)) == first


def test_a_million_draws_are_located_fast_and_in_memory_of_order_8_bytes_per_row() -> None:
    mixture, count = mixed({"count": 600_000}, {"count": 1000, "epochs": 200}, {"count": 200_000}), 1_000_000
    assert mixture.pass_length == count
    draws = np.arange(count)
    tracemalloc.start()
    try:
        datasets, rows = mixture.locate_many(draws)
        del datasets, rows
        assert tracemalloc.get_traced_memory()[0] < 10 * count
    finally:
        tracemalloc.stop()


def write(path: Path, *contents: str) -> str:
    rows = [{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": c}]} for c in contents]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_draw_gives_the_conversation_with_its_source_and_dataset(tmp_path: Path) -> None:
    paths = [write(tmp_path / "one.jsonl", "0", "1", "2"), write(tmp_path / "two.jsonl", "3", "{")]
    Path(paths[1]).write_text(Path(paths[1]).read_text().replace('"{"', "{"))
    mixture = Mixture([DatasetConfig(path=paths[0]), DatasetConfig(path=paths[1], name="b")], seed=0)
    seen = set()
    for draw in range(5):
        if mixture.source(draw) == f"{paths[1]}:2":
            with pytest.raises(DataError, match=r"two\.jsonl:2: a row must be one JSON object"):
                mixture.conversation(draw)
            continue
        conversation = mixture.conversation(draw)
        assert mixture.source(draw) == conversation.source
        seen.add((conversation.dataset, conversation.source, conversation.messages[1]["content"]))
    assert seen == {
        ("one", f"{paths[0]}:1", "0"),
        ("one", f"{paths[0]}:2", "1"),
        ("one", f"{paths[0]}:3", "2"),
        ("b", f"{paths[1]}:1", "3"),
    }
    with pytest.raises(ValueError, match="draw must be at least 0, got -1"):
        mixture.locate(-1)
    with pytest.raises(ValueError, match="draws must be at least 0, got -2"):
        mixture.locate_many(np.array([3, -2]))


BAD_MIXTURES: dict[str, tuple[list[dict[str, Any]], str]] = {
    "none": ([], "a mixture must have at least one dataset, got none; name a file"),
    "one name twice": ([{"path": "5"}, {"path": "x/5"}], "must have different names, got 5 more than once; set name"),
    "all weights zero": ([{"path": "5", "weight": 0}, {"path": "6", "weight": 0}], "weights must not all be zero"),
    "weights and nothing": (
        [{"path": "5", "weight": 1}, {"path": "6"}],
        "all datasets have a weight or none .* for 6;",
    ),
    "weights and epochs": (
        [{"path": "5", "weight": 1}, {"path": "6", "epochs": 2}],
        "have a weight or none .* for 6; ",
    ),
    "an epoch of no row": (
        [{"path": "5", "epochs": 0.01}],
        "one row of dataset 5, got none: epochs 0.01 of its 5 rows",
    ),
    "a weight of no row": (
        [{"path": "5", "weight": 1e-9}, {"path": "6", "weight": 1}],
        "one row of dataset 5, got none: weight 1e-09 of its 5 rows; raise it or remove",
    ),
}


@pytest.mark.parametrize("name", BAD_MIXTURES)
def test_datasets_that_do_not_go_together_are_refused(name: str) -> None:
    configs, message = BAD_MIXTURES[name]
    with pytest.raises(ConfigError, match=message):
        Mixture([DatasetConfig.model_validate(config) for config in configs], seed=0)


def test_a_missing_and_an_empty_dataset_are_named(tmp_path: Path) -> None:
    good = write(tmp_path / "good.jsonl", "x")
    for bad, message in (
        (tmp_path / "none.jsonl", "No such file"),
        (write(tmp_path / "e.jsonl"), "got none; write one"),
    ):
        with pytest.raises(DataError, match=message):
            Mixture([DatasetConfig(path=good), DatasetConfig(path=str(bad))], seed=0)


class _Run(ConfigModel):
    train: list[DatasetConfig]


def test_a_path_alone_stands_for_a_dataset_in_a_run_file(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("train: [data/a.jsonl, {path: data/v1.5/, weight: 2}]")
    first, second = load_config(tmp_path / "run.yaml", _Run).train
    assert (first.path, first.label, first.weight, first.epochs) == ("data/a.jsonl", "a", None, None)
    assert (second.path, second.label, second.weight) == ("data/v1.5/", "v1.5", 2)
    check_mixture([first])
    (one,) = load_config(tmp_path / "run.yaml", _Run, ["train=[b.parquet]"]).train
    assert one.label == "b"
    for override, message in {
        "train.1.weight=-1": r"train\.1\.weight must be greater than or equal to 0, got -1",
        "train.1.epochs=3": r"train\.1: a dataset may have weight or epochs, got both \(2 and 3\); remove one",
        "train=[{path: x, epochs: 0}]": r"train\.0\.epochs must be greater than 0, got 0",
        "train=[{path: ''}]": r"train\.0\.path must have at least 1 character, got ''",
        "train=[{weight: 1}]": r"train\.0\.path is required and missing",
        "train=[3]": r"train\.0 must be a mapping of keys, got 3",
    }.items():
        with pytest.raises(ConfigError, match=message):
            load_config(tmp_path / "run.yaml", _Run, [override])
    with pytest.raises(ValidationError):
        DatasetConfig(path="a", weight=float("nan"))
