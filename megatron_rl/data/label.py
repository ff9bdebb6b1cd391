"""Effort labels for files of conversations, in two passes: lengths and levels of all rows first, then a label each.

Invariant: a row's label depends on the row, the seed and the multiset of lengths in its group; never on the order of
rows, on how a dataset is cut into files, or on other datasets. Memory is 6 bytes per row, beside the readers' own.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_rl.config import DataError
from megatron_rl.data.conversation import EFFORTS, Conversation, conversation_of, shown
from megatron_rl.data.difficulty import Difficulty
from megatron_rl.data.effort import Thresholds, draw_efforts, sample_uniform
from megatron_rl.data.effort_groups import Group, Measured, groups_of
from megatron_rl.data.rows import Rows, iterate, open_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

OnRow = Callable[[str], None]
"""Called after each row with the pass it is in: lengths or labels."""

_BATCH_CHARACTERS = 1 << 20
"""Reasoning that is tokenized at once."""
_BATCH_ROWS = 256
"""Rows whose labels are drawn at once."""
_NO_TRACE = Thresholds(1.0, 1.0)
"""For a dataset without any reasoning, whose rows are all labelled none."""
_THINKING_MARK = "<think>"


@dataclass(frozen=True)
class Dataset:
    """Files whose rows are one dataset."""

    name: str
    files: list[Rows]

    def __len__(self) -> int:
        return sum(len(rows) for rows in self.files)


@dataclass(frozen=True)
class LabelReport:
    """What label() did."""

    seed: int
    groups: list[Group]
    hidden_reasoning: int
    """Rows whose only reasoning stands inside content, where it is not seen: they were labelled none."""

    def as_json(self) -> dict[str, Any]:
        """The report as a file holds it."""
        totals = {effort: sum(group.counts[effort] for group in self.groups) for effort in EFFORTS}
        return {
            "seed": self.seed,
            "rows": sum(group.rows for group in self.groups),
            "labels": totals,
            "hidden_reasoning": self.hidden_reasoning,
            "groups": [group.as_json() for group in self.groups],
        }


def open_datasets(arguments: Sequence[str]) -> list[Dataset]:
    """Datasets from arguments PATH or NAME=PATH. Files of the same NAME are one; a PATH alone is named by its stem.

    DataError as in open_rows, or for two datasets of one name.
    """
    files: dict[str, list[Rows]] = {}
    unnamed: set[str] = set()
    for argument in arguments:
        name, equals, path = argument.partition("=")
        if not equals or Path(argument).exists():
            name, path = Path(argument).resolve().stem, argument
            unnamed.add(name)
        if not name or "/" in name or name.startswith("."):
            raise DataError(f"a dataset must have a plain name, got {name!r} in {argument!r}; write NAME=PATH")
        if name in files and name in unnamed:
            raise DataError(
                f"a dataset must have a name of its own, got {name} for {files[name][0].path} and {path}; write "
                "NAME=PATH, with one NAME for both if they are one dataset"
            )
        files.setdefault(name, []).append(open_rows(path))
    return [Dataset(name, rows) for name, rows in files.items()]


def conversations(dataset: Dataset) -> Iterator[tuple[dict[str, Any], Conversation]]:
    """(row as it is, its checked conversation). DataError for the first row that is malformed or labelled already."""
    for rows in dataset.files:
        for source, row in iterate(rows):
            if isinstance(row, DataError):
                raise row
            if row.get("effort") is not None:
                raise DataError(
                    f"{source}: a row to label must have no effort yet, got {shown(row['effort'])}; remove the column "
                    "to label it anew, or train on the file as it is"
                )
            yield row, conversation_of(source, row, dataset=dataset.name)


def label(
    datasets: Sequence[Dataset],
    out: Path,
    *,
    tokenizer: "PreTrainedTokenizerFast",
    difficulty: Difficulty,
    seed: int,
    on_row: OnRow = lambda phase: None,
) -> LabelReport:
    """Writes out/NAME.jsonl for each dataset: its rows in their order, every column kept, and `effort`.

    out appears when all files are complete. DataError for the first row that does not fit, ValueError if out
    exists.
    """
    if out.exists():
        raise ValueError(f"out must not exist, got {out}")
    count_tokens = _token_counter(tokenizer)
    measured = [_measure(dataset, difficulty, count_tokens, on_row) for dataset in datasets]
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    temporary.mkdir(parents=True)
    groups: list[Group] = []
    hidden = 0
    try:
        for dataset, lengths in zip(datasets, measured, strict=True):
            own = groups_of(lengths)
            hidden += _write(dataset, temporary / f"{dataset.name}.jsonl", lengths, own, seed=seed, on_row=on_row)
            groups += sorted(own, key=lambda group: group.difficulty)
        temporary.rename(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return LabelReport(seed, groups, hidden)


def sample_id(row: Mapping[str, Any], conversation: Conversation) -> str:
    """The row's column `id`, or a digest of its messages. DataError if id is neither text nor a whole number."""
    given = row.get("id")
    if given is None or given == "":
        messages = json.dumps(conversation.messages, sort_keys=True, separators=(",", ":"))
        return hashlib.blake2b(messages.encode(), digest_size=16).hexdigest()
    if not isinstance(given, str | int):
        raise DataError(
            f"{conversation.source}: id must be text or a whole number, got {shown(given)}; mend it or leave it out"
        )
    return str(given)


def _measure(
    dataset: Dataset, difficulty: Difficulty, count_tokens: Callable[[list[str]], list[int]], on_row: OnRow
) -> Measured:
    measured = Measured(dataset.name)
    waiting: list[tuple[str, str, list[str]]] = []
    """(source, level, reasoning texts) of rows that are tokenized together."""

    def flush() -> None:
        counts = iter(count_tokens([text for _, _, texts in waiting for text in texts]))
        for source, level, texts in waiting:
            measured.add(source, sum(next(counts) for _ in texts), level)
        waiting.clear()

    characters = 0
    for row, conversation in conversations(dataset):
        texts = _reasoning(conversation)
        waiting.append((conversation.source, difficulty.level(row, conversation), texts))
        characters += 100 + sum(map(len, texts))
        if characters > _BATCH_CHARACTERS:
            flush()
            characters = 0
        on_row("lengths")
    flush()
    return measured


def _write(
    dataset: Dataset, path: Path, measured: Measured, groups: Sequence[Group], *, seed: int, on_row: OnRow
) -> int:
    """Number of rows whose reasoning is hidden in their content."""
    hidden = 0
    rows = zip(conversations(dataset), measured.lengths, measured.level_of, strict=True)
    with path.open("wb") as file:
        while batch := list(islice(rows, _BATCH_ROWS)):
            ids = [sample_id(row, conversation) for (row, conversation), _, _ in batch]
            of_row = [groups[level] for _, _, level in batch]
            efforts = _draw(ids, [length for _, length, _ in batch], of_row, seed)
            for ((row, conversation), length, level), effort in zip(batch, efforts, strict=True):
                hidden += not length and _hides_reasoning(conversation)
                groups[level].counts[effort] += 1
                file.write(_line({**row, "effort": effort}, conversation.source))
                on_row("labels")
    return hidden


def _draw(ids: Sequence[str], lengths: Sequence[int], groups: Sequence[Group], seed: int) -> list[str]:
    """The label of each row, by its length and its group."""
    uniforms = np.array([sample_uniform(seed, row_id) for row_id in ids])
    edges = [group.thresholds or _NO_TRACE for group in groups]
    l30, l70 = np.array([edge.l30 for edge in edges]), np.array([edge.l70 for edge in edges])
    return [EFFORTS[code] for code in draw_efforts(uniforms, np.array(lengths), l30, l70)]


def _reasoning(conversation: Conversation) -> list[str]:
    return [text for message in conversation.messages if (text := message.get("reasoning_content"))]


def _hides_reasoning(conversation: Conversation) -> bool:
    return any(
        message["role"] == "assistant" and (message["content"] or "").lstrip().startswith(_THINKING_MARK)
        for message in conversation.messages
    )


def _token_counter(tokenizer: "PreTrainedTokenizerFast") -> Callable[[list[str]], list[int]]:
    """Tokens of each text by itself, none of them special tokens that a tokenizer adds."""
    from tokenizers import Tokenizer

    encoder = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    encoder.post_processor = None
    encoder.no_truncation()
    encoder.no_padding()
    return lambda texts: [len(encoding) for encoding in encoder.encode_batch_fast(texts, add_special_tokens=False)]


def _line(row: Mapping[str, Any], source: str) -> bytes:
    try:
        return json.dumps(row, ensure_ascii=False).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{source}: a row must hold values that JSON can hold, got: {error}; convert or drop that column"
        ) from None
