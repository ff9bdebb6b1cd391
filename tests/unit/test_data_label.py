"""Files of labels: the same for any order and cut of the input, nothing lost, and one error for what does not fit."""

import json
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_rl.config import DataError
from megatron_rl.data import label as label_module
from megatron_rl.data.difficulty import UNGRADED, ColumnDifficulty, Difficulty, NoDifficulty
from megatron_rl.data.effort import draw_effort
from megatron_rl.data.label import Dataset, LabelReport, label, open_datasets

Row = dict[str, Any]


@pytest.fixture(scope="module")
def words() -> Any:
    """A tokenizer that counts words, and adds special tokens of its own where it is let."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    backend = Tokenizer(models.WordLevel({"[UNK]": 0, "[CLS]": 1}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", 1)])
    backend.enable_truncation(4)
    return SimpleNamespace(backend_tokenizer=backend)


def row(length: int, *, reasoning: Any = "", **columns: Any) -> Row:
    """One exchange whose reasoning has so many words."""
    text = reasoning or " ".join(["hm"] * length)
    answer = {"role": "assistant", "content": "done"} | ({"reasoning_content": text} if text else {})
    return {"messages": [{"role": "user", "content": f"task of {length}"}, answer], **columns}


def write(path: Path, rows: Sequence[Row]) -> str:
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return str(path)


def read(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def labelled(tmp: Path, words: Any, arguments: Sequence[str], difficulty: Difficulty, **options: Any) -> LabelReport:
    return label(open_datasets(arguments), tmp, tokenizer=words, difficulty=difficulty, **{"seed": 0, **options})


def expected_labels(rows: Sequence[Row], lengths: Sequence[int]) -> dict[str, str]:
    """Labels by id, in plain Python, from SPEC 12."""
    labels = {}
    for one, length in zip(rows, lengths, strict=True):
        level = [n for other, n in zip(rows, lengths, strict=True) if other["level"] == one["level"] and n]
        traces = level if len(level) >= 8 else [n for n in lengths if n]
        l30, l70 = np.percentile(traces, [30, 70]) if traces else (1, 1)
        labels[one["id"]] = draw_effort(0, one["id"], length, l30, l70)
    return labels


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.sampled_from(["easy", "hard", "odd"])), min_size=1, max_size=50),
    st.integers(1, 4),
    st.randoms(),
)
def test_labels_are_those_of_the_formula_under_any_order_and_cut(
    tmp_path_factory: pytest.TempPathFactory, words: Any, drawn: list[tuple[int, str]], shards: int, shuffle: Any
) -> None:
    tmp_path = tmp_path_factory.mktemp("labels")
    rows = [row(length, level=level, id=f"r{i}") for i, (length, level) in enumerate(drawn)]
    expected = expected_labels(rows, [length for length, _ in drawn])
    shuffle.shuffle(rows)
    cut = [part for part in (rows[i::shards] for i in range(shards)) if part]
    arguments = [f"mix={write(tmp_path / f'{i}.jsonl', part)}" for i, part in enumerate(cut)]
    # Another dataset's lengths are no concern of this one's.
    arguments.insert(shuffle.randint(0, len(arguments)), write(tmp_path / "other.jsonl", [row(900, level="easy")]))
    report = labelled(tmp_path / "out", words, arguments, ColumnDifficulty("level"))
    found = read(tmp_path / "out" / "mix.jsonl")
    assert {one["id"]: one.pop("effort") for one in found} == expected
    assert found == [one for part in cut for one in part], "every row once, in its order, with every column"
    assert sum(group.rows for group in report.groups) == len(rows) + 1


def test_without_ids_the_text_decides_and_the_form_of_the_file_does_not(tmp_path: Path, words: Any) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [row(length) for length in range(1, 60)]
    rows[0]["messages"][1]["tool_calls"] = [{"function": {"name": "f", "arguments": {"a": 1}}}]
    lines = write(tmp_path / "lines.jsonl", rows)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "table.parquet")
    labelled(tmp_path / "out", words, [lines, str(tmp_path / "table.parquet")], NoDifficulty())
    one, other = (read(tmp_path / "out" / f"{name}.jsonl") for name in ("lines", "table"))
    efforts = [found["effort"] for found in one]
    assert efforts == [found["effort"] for found in other] and len(set(efforts)) == 3
    labelled(tmp_path / "again", words, [lines], NoDifficulty(), seed=1)
    assert [found["effort"] for found in read(tmp_path / "again" / "lines.jsonl")] != efforts


def test_the_reasoning_of_all_turns_counts_and_special_tokens_do_not(tmp_path: Path, words: Any) -> None:
    two_turns = row(3)
    two_turns["messages"] += row(2)["messages"]
    rows = [two_turns, *(row(length) for length in range(1, 12) if length != 5)]
    (group,) = labelled(tmp_path / "out", words, [write(tmp_path / "a.jsonl", rows)], NoDifficulty()).groups
    assert group.thresholds is not None
    assert (group.thresholds.l30, group.median, group.thresholds.l70) == (4, 6, 8), "of the lengths 1 to 11"


def test_the_report_tells_groups_split_and_what_it_could_not_see(tmp_path: Path, words: Any) -> None:
    rows = [row(n + 1, d="easy") for n in range(21)] + [row(20, d=None), row(0, d=float("nan"))]
    rows += [row(5, d=7), row(0, d=7.0)]
    for seen in (3, 22):
        rows[seen]["messages"][1]["content"] = " <think>hidden</think> done"
    report = labelled(tmp_path / "out", words, [write(tmp_path / "a.jsonl", rows)], ColumnDifficulty("d")).as_json()
    groups = {group["difficulty"]: group for group in report["groups"]}
    assert list(groups) == ["7", "easy", UNGRADED], "in order of their names"
    assert (groups["easy"]["l30"], groups["easy"]["origin"], groups["7"]["origin"]) == (7.0, "group", "dataset")
    assert (groups["7"]["rows"], groups["7"]["traces"], groups["7"]["counts"]["none"]) == (2, 1, 1)
    assert groups[UNGRADED]["rows"] == 2
    assert report["hidden_reasoning"] == 1, "row 3 has a reasoning besides"
    assert report["rows"] == 25
    efforts = [one["effort"] for one in read(tmp_path / "out" / "a.jsonl")]
    assert report["labels"] == {effort: efforts.count(effort) for effort in ("none", "low", "medium", "high")}
    assert report["labels"]["none"] == 2


def test_memory_does_not_grow_with_the_rows(tmp_path: Path, words: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(label_module, "_BATCH_CHARACTERS", 5_000)

    class Endless:
        """Rows made when they are asked for."""

        path = tmp_path

        def __init__(self, count: int) -> None:
            self._count = count

        def __len__(self) -> int:
            return self._count

        def source(self, index: int) -> str:
            return f"[{index}]"

        def row(self, index: int) -> Row:
            return row(index % 50, id=index)

        def identity(self) -> str:
            return ""

    def peak(count: int) -> int:
        tracemalloc.start()
        dataset = Dataset("a", [Endless(count)])
        label([dataset], tmp_path / str(count), tokenizer=words, difficulty=NoDifficulty(), seed=0)
        (_, highest), _ = tracemalloc.get_traced_memory(), tracemalloc.stop()
        return highest

    peak(600)
    assert peak(1800) - peak(601) < 1200 * 40, "6 bytes a row, and a copy in passing for percentiles"


@pytest.mark.parametrize(
    ("rows", "words_of_the_error"),
    [
        ([row(3), row(3, reasoning=["a", "b"])], ["a.jsonl:2", "reasoning_content must be text"]),
        ([row(3), row(3, reasoning="\ud800")], ["a.jsonl:2", "half of a surrogate pair"]),
        ([row(3, effort="low")], ["a.jsonl:1", "no effort yet", "low"]),
        ([row(3, id=[1])], ["a.jsonl:1", "id must be text or a whole number"]),
        ([row(3, id=1.5)], ["a.jsonl:1", "id must be text or a whole number"]),
        ([{"messages": []}], ["a.jsonl:1", "messages"]),
    ],
)
def test_a_row_that_does_not_fit_is_named_and_nothing_is_left_behind(
    tmp_path: Path, words: Any, rows: list[Row], words_of_the_error: list[str]
) -> None:
    with pytest.raises(DataError) as error:
        labelled(tmp_path / "out", words, [write(tmp_path / "a.jsonl", rows)], NoDifficulty())
    assert all(part in str(error.value) for part in words_of_the_error), error.value
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_a_column_that_json_cannot_hold_is_refused(tmp_path: Path, words: Any) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist([row(3, image=b"\xff")]), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a.parquet\[0\].*JSON can hold.*bytes"):
        labelled(tmp_path / "out", words, [str(tmp_path / "a.parquet")], NoDifficulty())
    assert not (tmp_path / "out").exists()


def test_datasets_are_named_by_their_files_or_by_hand(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    one, other = write(tmp_path / "a.jsonl", [row(1)]), write(tmp_path / "b" / "a.jsonl", [row(1), row(2)])
    assert [(data.name, len(data)) for data in open_datasets([f"x={one}", f"x={other}", other])] == [("x", 3), ("a", 2)]
    with pytest.raises(DataError, match="name of its own, got a for"):
        open_datasets([one, other])
    with pytest.raises(DataError, match="plain name"):
        open_datasets([f"../x={one}"])
    equals = write(tmp_path / "k=v.jsonl", [row(1)])
    assert [data.name for data in open_datasets([equals])] == ["k=v"], "a path that exists is a path"
    with pytest.raises(DataError, match=r"no.jsonl must be readable"):
        open_datasets([str(tmp_path / "no.jsonl")])


def test_an_unknown_column_gets_the_nearest_name(tmp_path: Path, words: Any) -> None:
    path = write(tmp_path / "a.jsonl", [row(3, difficulty="easy")])
    with pytest.raises(DataError, match=r"a.jsonl:1: .*'dificulty'.*did you mean difficulty\?"):
        labelled(tmp_path / "out", words, [path], ColumnDifficulty("dificulty"))
    with pytest.raises(DataError, match="must hold text or a number"):
        labelled(tmp_path / "out", words, [path], ColumnDifficulty("messages"))


def test_an_output_that_exists_is_left_alone(tmp_path: Path, words: Any) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match="must not exist"):
        labelled(tmp_path / "out", words, [write(tmp_path / "a.jsonl", [row(3)])], NoDifficulty())
