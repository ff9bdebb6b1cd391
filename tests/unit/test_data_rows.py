"""Files of rows: the same rows from every form, each named by its place, read at random and in little memory."""

import json
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.config import DataError
from megatron_rl.data.arrow_rows import ParquetRows, RowGroups
from megatron_rl.data.conversation import conversation_of
from megatron_rl.data.jsonl_rows import JsonlRows
from megatron_rl.data.rows import iterate, open_rows

CALLS: list[dict[str, Any]] = [{"city": "Zürich"}, {"a": 1.5, "b": {"c": [1, 2]}}, {}]
ROWS: list[dict[str, Any]] = [
    {
        "id": str(index),
        "messages": [
            {"role": "user", "content": f"ü{index}"},
            {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": call}}]},
            {"role": "tool", "content": "z", "tool_call_id": "1"},
            {"role": "assistant", "content": "y", "reasoning_content": "r"},
        ],
        "tools": [
            {"name": "f", "parameters": {"type": "object", "properties": {key: {"type": "any"} for key in call}}}
        ],
        "effort": "low" if index % 2 else None,
    }
    for index, call in enumerate(CALLS * 4)
]


def as_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def as_parquet(path: Path, rows: list[dict[str, Any]], row_group_size: int = 5) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=row_group_size)
    return path


def as_dataset(path: Path, rows: list[dict[str, Any]], **options: Any) -> Path:
    from datasets import Dataset

    Dataset.from_list(rows, **options).save_to_disk(path, num_shards=min(2, len(rows)))
    return path


def as_folder(path: Path, rows: list[dict[str, Any]]) -> Path:
    """All forms side by side; names sort in the order of the rows."""
    path.mkdir()
    as_parquet(path / "b.parquet", rows[3:8])
    as_jsonl(path / "c.jsonl", rows[8:10])
    as_jsonl(path / "a.jsonl", rows[:3])
    as_dataset(path / "d", rows[10:])
    (path / "README.md").write_text("not data")
    (path / ".hidden").write_text("not data")
    return path


FORMS: dict[str, Callable[[Path], Path]] = {
    "JSONL": lambda folder: as_jsonl(folder / "rows.jsonl", ROWS),
    "Parquet": lambda folder: as_parquet(folder / "rows.parquet", ROWS),
    "Parquet of JSON columns": lambda folder: as_parquet_of_json(folder / "rows.parquet"),
    "datasets": lambda folder: as_dataset(folder / "rows", ROWS),
    "datasets of JSON columns": lambda folder: as_dataset(folder / "rows", ROWS, on_mixed_types="use_json"),
    "folder": lambda folder: as_folder(folder / "rows", ROWS),
}


def as_parquet_of_json(path: Path) -> Path:
    columns = {name: pa.array([json.dumps(row[name]) for row in ROWS], pa.json_()) for name in ("messages", "tools")}
    pq.write_table(pa.table({**columns, "effort": pa.array([row["effort"] for row in ROWS])}), path)
    return path


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_conversations_in_any_order(form: str, tmp_path: Path) -> None:
    rows = open_rows(FORMS[form](tmp_path))
    assert len(rows) == len(ROWS)
    for index in (7, 0, 11, 3, *range(12)):
        read = conversation_of(rows.source(index), rows.row(index))
        assert read == conversation_of(rows.source(index), ROWS[index]), index
    assert list(iterate(rows)) == [(rows.source(index), rows.row(index)) for index in range(12)]
    for outside in (-1, 12):
        with pytest.raises(IndexError, match=f"rows 0 to 11, got {outside}"):
            rows.row(outside)


def test_sources_name_file_and_line_or_row(tmp_path: Path) -> None:
    folder = as_folder(tmp_path / "all", ROWS)
    rows = open_rows(folder)
    named = [rows.source(index).removeprefix(f"{folder}/") for index in range(12)]
    parts = [f"a.jsonl:{line}" for line in (1, 2, 3)] + [f"b.parquet[{row}]" for row in range(5)]
    assert named == [*parts, "c.jsonl:1", "c.jsonl:2", "d[0]", "d[1]"]
    for name in "fbhdgace":
        as_jsonl(tmp_path / f"{name}.jsonl", ROWS[:1])
    shutil.rmtree(folder)
    many = open_rows(tmp_path)
    assert [Path(many.source(index)).name for index in range(8)] == [f"{name}.jsonl:1" for name in "abcdefgh"]


blanks = st.sampled_from([b"\n", b"\r\n", b"  \t \n", b"\x0b\x0c\n"])


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(blanks, max_size=3), st.text("aü\u2028 ", max_size=9), st.sampled_from([b"\n", b"\r\n"]))
    ),
    st.lists(blanks, max_size=2),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_lines_are_found_among_blank_ones(
    tmp_path_factory: pytest.TempPathFactory, lines: Any, tail: list[bytes], last_end: bool, random: Any
) -> None:
    data = b"".join(
        b"".join(before) + json.dumps({"a": text}, ensure_ascii=False).encode() + end for before, text, end in lines
    )
    data = (data + b"".join(tail)) if last_end else data.rstrip(b"\r\n")
    path = tmp_path_factory.mktemp("lines") / "rows.jsonl"
    path.write_bytes(data)
    expected = [(number, json.loads(line)) for number, line in enumerate(data.split(b"\n"), 1) if line.strip()]
    rows = JsonlRows(path)
    order = list(range(len(rows)))
    random.shuffle(order)
    read = {index: (rows.source(index), rows.row(index)) for index in order}
    assert [read[index] for index in range(len(rows))] == [(f"{path}:{number}", row) for number, row in expected]


BAD_LINES = {
    "malformed": (b'{"messages": [', "must be one JSON object, got malformed JSON: Expecting value at column 15"),
    "two objects": (b"{} {}", "must be one JSON object, got malformed JSON: Extra data at column 4"),
    "a number too long": (b"9" * 5000, "must be one JSON object, got malformed JSON"),
    "nested without end": (b"[" * 100_000, "must be one JSON object, got malformed JSON"),
    "not UTF-8": (b'{"a": "\xff"}', "must be UTF-8 text, got byte 0xff"),
    "a list": (b"[1, 2]", r"must be a JSON object, got \[1, 2\]"),
    "half a character": (rb'{"a": ["\uD800"]}', "must be Unicode text, got half of a surrogate pair; mend the escape"),
    "half a character as key": (rb'{"\udfff": 1}', "must be Unicode text, got half of a surrogate pair"),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_is_named_and_the_others_are_still_read(name: str, tmp_path: Path) -> None:
    bad, message = BAD_LINES[name]
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": "\\ud83d\\ude00"}\n\n' + bad + b'\n{"a": 2}\n')
    rows = open_rows(path)
    (first, one), (second, error), (third, two) = iterate(rows)
    assert (first, second, third) == (f"{path}:1", f"{path}:3", f"{path}:4")
    assert (one, two) == ({"a": "😀"}, {"a": 2})
    assert isinstance(error, DataError)
    with pytest.raises(DataError, match=message) as caught:
        raise error
    text = str(caught.value)
    assert text.startswith(f"{path}:3: ") and "; " in text and "\n" not in text and len(text) < 400


def empty_parquet(path: Path) -> None:
    pq.write_table(pa.table({"messages": pa.array([], pa.string())}), path / "rows.parquet")


def splits(path: Path) -> None:
    from datasets import Dataset, DatasetDict

    one = Dataset.from_list(ROWS[:1])
    DatasetDict({"train": one, "test": one}).save_to_disk(path)


def damaged_dataset(path: Path) -> None:
    as_dataset(path / "rows", ROWS)
    for file in (path / "rows").glob("*.arrow"):
        file.write_bytes(b"no arrow")


BAD_FILES: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "missing": ("none.jsonl", lambda _: None, r"none\.jsonl must be readable, got No such file or directory; give"),
    "missing Parquet": ("none.parquet", lambda _: None, r"none\.parquet must be readable, got No such file"),
    "missing of no form": ("none", lambda _: None, r"none must be readable, got No such file or directory"),
    "other suffix": ("a.csv", lambda path: (path / "a.csv").write_text("x"), r"a\.csv must be a .* got \.csv; convert"),
    "no suffix": ("a", lambda path: (path / "a").write_text("x"), r"/a must be a .*, got no suffix; convert it"),
    "empty": (
        "e.jsonl",
        lambda path: (path / "e.jsonl").write_bytes(b"\n  \n"),
        r"at least one conversation, got none",
    ),
    "empty Parquet": ("rows.parquet", empty_parquet, r"rows\.parquet must have at least one conversation, got none"),
    "empty folder": ("", lambda _: None, r"must hold \.jsonl or \.parquet files, got none; give the path of"),
    "empty file in a folder": (
        "",
        lambda path: (path / "e.jsonl").write_bytes(b""),
        r"e\.jsonl must have at least one",
    ),
    "damaged Parquet": (
        "a.parquet",
        lambda path: (path / "a.parquet").write_bytes(b"PAR1" + b"x" * 99),
        r"a\.parquet must be readable, got ArrowInvalid: .*; write it anew",
    ),
    "damaged datasets folder": ("rows", damaged_dataset, r"data folder .*rows must be readable, got ArrowInvalid: "),
    "several splits": ("", splits, r"must be one split, got several: test, train; name one, as in .*/test"),
    "folder of something else": ("", lambda path: (path / "a.csv").write_text("x"), r"nothing but .* got a\.csv; move"),
    "folder in a folder": ("", lambda path: (path / "sub").mkdir(), r"must hold nothing but .* got sub; move it away"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_file_that_cannot_be_read_is_named_with_the_cure(name: str, tmp_path: Path) -> None:
    file, make, message = BAD_FILES[name]
    make(tmp_path)
    with pytest.raises(DataError, match=message) as caught:
        open_rows(tmp_path / file)
    assert "\n" not in str(caught.value) and "; " in str(caught.value)


def test_a_file_that_was_cut_or_removed_after_the_start_is_named(tmp_path: Path) -> None:
    path = as_jsonl(tmp_path / "rows.jsonl", ROWS)
    rows = open_rows(path)
    path.write_bytes(path.read_bytes()[:-9])
    assert rows.row(0) == ROWS[0]
    with pytest.raises(DataError, match=r"rows\.jsonl:12: the file must stay as it was .* got a shorter one"):
        rows.row(11)
    path.unlink()
    with pytest.raises(DataError, match=r"rows\.jsonl:1: the file must stay readable, got No such file"):
        rows.row(0)
    as_parquet(tmp_path / "rows.parquet", ROWS)
    parquet = open_rows(tmp_path / "rows.parquet")
    (tmp_path / "rows.parquet").write_bytes(b"")
    with pytest.raises(DataError, match=r"rows\.parquet\[3\] must be readable, got "):
        parquet.row(3)


@pytest.mark.parametrize("form", ["JSONL", "Parquet", "datasets", "folder"])
def test_identity_follows_the_contents_and_not_the_path(form: str, tmp_path: Path) -> None:
    path = FORMS[form](tmp_path)
    identity = open_rows(path).identity()
    moved = path.with_name(f"moved{path.suffix}")
    (shutil.copytree if path.is_dir() else shutil.copy)(path, moved)
    assert open_rows(moved).identity() == identity
    other = tmp_path / "other"
    other.mkdir()
    ROWS[9]["messages"][0]["content"] = "ö9"
    try:
        assert open_rows(FORMS[form](other)).identity() != identity
    finally:
        ROWS[9]["messages"][0]["content"] = "ü9"
    for file in sorted(moved.glob("*.arrow"))[-1:]:
        file.write_bytes(file.read_bytes().replace("ü9".encode(), "ö9".encode()))
    assert (open_rows(moved).identity() != identity) == (form == "datasets")


def test_row_groups_are_decoded_once_while_they_fit_and_the_rest_makes_room(tmp_path: Path) -> None:
    path = as_parquet(tmp_path / "rows.parquet", ROWS, row_group_size=3)
    sizes = [pq.ParquetFile(path).read_row_group(group).nbytes for group in range(4)]

    def decoded(max_bytes: int, order: list[int]) -> int:
        count = 0

        class Counting(RowGroups):
            def get(self, key: Any, read: Callable[[], pa.Table]) -> pa.Table:
                def counted() -> pa.Table:
                    nonlocal count
                    count += 1
                    return read()

                table = super().get(key, counted)
                held = [one.nbytes for one in self._tables.values()]
                assert sum(held) == self._num_bytes and (sum(held) <= max_bytes or len(held) == 1)
                return table

        rows = ParquetRows(path, Counting(max_bytes))
        for index in order:
            assert rows.row(index)["id"] == str(index)
        return count

    assert decoded(sum(sizes), [0, 11, 5, 8, 1, 10, 4, 7]) == 4
    assert decoded(0, list(range(12))) == 4
    assert decoded(max(sizes) * 2, [0, 3, 1, 6, 2, 3]) == 4, "of three groups for two places, the last used stay"


def test_a_long_file_is_indexed_and_streamed_in_little_memory(tmp_path: Path) -> None:
    """8 bytes per line; the array's growth may ask for a little more for a moment."""
    path, count, filler = tmp_path / "rows.jsonl", 150_000, "x" * 60
    with path.open("w") as file:
        file.writelines(f'{{"i": {index}, "filler": "{filler}"}}\n' for index in range(count))
    tracemalloc.start()
    try:
        rows = open_rows(path)
        held, peak = tracemalloc.get_traced_memory()
        assert held < 9.5 * count and peak < 9.5 * count + (3 << 20)
        tracemalloc.reset_peak()
        for index, (_, row) in zip(range(2_000), iterate(rows), strict=False):
            assert isinstance(row, dict) and row["i"] == index
        assert tracemalloc.get_traced_memory()[1] - held < 100_000
        assert rows.row(count - 1)["i"] == count - 1
    finally:
        tracemalloc.stop()
