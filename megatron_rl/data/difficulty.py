"""How hard a row's task is: what a column says, or what a grader behind an OpenAI-compatible endpoint answers.

A grade depends on the task's text alone, so the order of rows, their files and a restart do not matter: every task is
asked for once, its answer is kept in a journal, and an answer without exactly one level is the level `ungraded`.
Asking again would let chance decide about labels that are to be the same in every run.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Protocol

from pydantic import Field

from megatron_rl.config import ConfigModel, DataError, RunError
from megatron_rl.data.conversation import Conversation, shown
from megatron_rl.data.endpoint import Completion, Endpoint, EndpointConfig
from megatron_rl.data.journal import Job, Journal, RunCounts, run_all

LEVELS = ("easy", "medium", "hard")
"""What a grader may answer."""
UNGRADED = "ungraded"
"""Level of a row whose column is empty or whose grader gave none of LEVELS."""

_SYSTEM = (
    "You grade how hard a task is for a capable assistant. easy: it can be answered at once. medium: it takes a few "
    "steps of reasoning. hard: it takes long or expert reasoning. Do not solve the task."
)
_QUESTION = "<task>\n{task}\n</task>\n\nHow hard is this task? Answer with one word: easy, medium or hard."
_KEPT_AT_THE_END = 4
"""One of so many characters of a task that is too long is taken from its end."""


class GraderConfig(ConfigModel):
    """The model that grades tasks."""

    endpoint: EndpointConfig
    """Where it is served."""
    max_tokens: int = Field(ge=1, default=1024)
    """Most tokens of one answer, reasoning of the grader included; an answer that is cut off counts as ungraded."""
    max_task_characters: int = Field(ge=100, default=8000)
    """A longer task is shown to the grader without its middle."""


class Difficulty(Protocol):
    """Says a row's level."""

    def level(self, row: Mapping[str, Any], conversation: Conversation) -> str:
        """The level of a row; DataError with its source if it has none."""
        ...


class NoDifficulty:
    """All rows of a dataset are of one level, whose name is empty."""

    def level(self, row: Mapping[str, Any], conversation: Conversation) -> str:
        """The empty name."""
        return ""


class ColumnDifficulty:
    """The level is what a column holds: text, or a number, which is written out; ungraded where it is null or NaN."""

    def __init__(self, column: str) -> None:
        self._column = column

    def level(self, row: Mapping[str, Any], conversation: Conversation) -> str:
        """The column's value as text. DataError if the row has no such column, or something else in it."""
        if self._column not in row:
            meant = get_close_matches(self._column, list(row), n=1)
            cure = f"did you mean {meant[0]}?" if meant else "name one of those, or add it to the row"
            raise DataError(
                f"{conversation.source}: a row must have the difficulty column {self._column!r}, got "
                f"{', '.join(row)}; {cure}"
            )
        value = row[self._column]
        if value is None or value == "" or value != value:
            return UNGRADED
        if not isinstance(value, str | int | float):
            raise DataError(
                f"{conversation.source}: the difficulty column {self._column!r} must hold text or a number, got "
                f"{shown(value)}; name another column"
            )
        return f"{value:g}" if isinstance(value, float) else str(value)


class GradedDifficulty:
    """Levels from a journal that grade() has filled."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def level(self, row: Mapping[str, Any], conversation: Conversation) -> str:
        """The grade of the row's task; ungraded without a task."""
        task = task_of(conversation)
        value = self._journal.get(task_key(task)) if task else {"level": None}
        if value is None:
            raise RunError(f"{conversation.source}: must be graded, but its file changed meanwhile; start again")
        return value["level"] or UNGRADED


def open_grades(path: Path, config: GraderConfig) -> Journal:
    """The journal of this grader's answers. DataError if it was begun with another model or other settings."""
    settings = {
        "model": config.endpoint.model,
        "extra_body": config.endpoint.extra_body,
        "max_tokens": config.max_tokens,
        "max_task_characters": config.max_task_characters,
        "prompt": hashlib.sha256(f"{_SYSTEM}\n{_QUESTION}".encode()).hexdigest()[:16],
    }
    return Journal(path, settings)


async def grade(
    conversations: Iterable[Conversation],
    config: GraderConfig,
    journal: Journal,
    *,
    on_progress: Callable[[RunCounts], None] = lambda counts: None,
) -> RunCounts:
    """Puts {"level", "answer"} of every task into the journal that it lacks; level is null for an unparsable answer.

    RunError if requests failed for good; what was graded is kept, and another call asks for the rest.
    """
    async with Endpoint(config.endpoint) as endpoint:
        counts = await run_all(
            _jobs(conversations, config, endpoint),
            journal,
            concurrency=config.endpoint.concurrency,
            on_progress=on_progress,
        )
    if counts.failed:
        raise RunError(
            f"every task must be graded before any is labelled, but {counts.failed} of {counts.seen} failed, at last: "
            f"{counts.error}; run the same command again for these, the other answers are in {journal.path}"
        )
    return counts


def task_of(conversation: Conversation) -> str:
    """What is asked before the first answer: the user's messages, or the system prompt if there are none."""
    asked: dict[str, list[str]] = {"user": [], "system": []}
    for message in conversation.messages:
        if message["role"] == "assistant":
            break
        asked.setdefault(message["role"], []).append(message["content"])
    return "\n\n".join(asked["user"] or asked["system"]).strip()


def task_key(task: str) -> str:
    """Digest by which the journal knows a task."""
    return hashlib.blake2b(task.encode(), digest_size=16).hexdigest()


def parse_level(completion: Completion) -> str | None:
    """The level that an answer names, a reasoning in front of it left aside; None if it names none or several."""
    answer = completion.text.rpartition("</think>")[2]
    if completion.finish_reason == "length" or "<think>" in answer:
        return None
    named = {word for word in re.findall(r"[a-z]+", answer.casefold()) if word in LEVELS}
    return named.pop() if len(named) == 1 else None


def _jobs(conversations: Iterable[Conversation], config: GraderConfig, endpoint: Endpoint) -> Iterator[tuple[str, Job]]:
    for conversation in conversations:
        if task := task_of(conversation):
            yield task_key(task), _job(task, config, endpoint)


def _job(task: str, config: GraderConfig, endpoint: Endpoint) -> Job:
    question = _QUESTION.format(task=_shortened(task, config.max_task_characters))
    messages = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": question}]

    async def ask() -> dict[str, Any]:
        completion = await endpoint.chat(messages, max_tokens=config.max_tokens, temperature=0.0, seed=0)
        return {"level": parse_level(completion), "answer": completion.text[-200:]}

    return ask


def _shortened(task: str, limit: int) -> str:
    if len(task) <= limit:
        return task
    end = limit // _KEPT_AT_THE_END
    return f"{task[: limit - end]}\n[...]\n{task[-end:]}"
