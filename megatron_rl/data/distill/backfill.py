"""Reasoning backfill: one model writes why a tool is called, another must derive the same call from that alone."""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import xxhash

from megatron_rl.data.distill.answer import (
    EMPTY,
    MALFORMED,
    calls_in_text,
    canonical,
    canonical_calls,
    parsed_call,
    without_reasoning,
)
from megatron_rl.data.distill.config import BackfillRun, SamplingConfig
from megatron_rl.data.distill.language import LanguageJudge, language_name, language_share
from megatron_rl.data.distill.phrases import SHIPPED, instruction, shipped_texts
from megatron_rl.data.distill.prefill import OTHER_LANGUAGE
from megatron_rl.data.distill.rows import SourceRow, digest, output_row, whole_row
from megatron_rl.data.distill.tally import DROPPED, Tally, language_counts
from megatron_rl.data.distill.task import Outcome
from megatron_rl.data.endpoint import Completion, Endpoint
from megatron_rl.data.endpoint_answer import Message
from megatron_rl.data.journal import Job, Journal

NO_TOOLS, BROKEN_CALL, QUOTES_CALL = "row without tools", "the row's own call is malformed", "quotes the call"
OTHER_CALL = "leads to another call"


class BackfillTask:
    """Two requests per tool-call turn without reasoning: writing, and, if the text is usable, checking."""

    columns: Sequence[tuple[str, str]] = (
        ("rows", "rows"),
        ("turns", "turns"),
        ("written", "written"),
        ("stays", "in_language_share"),
        ("checked", "checked"),
        ("agree", "agreed_share"),
        ("filled", "kept"),
        ("tokens", "tokens"),
    )
    caption = (
        "turns: tool calls without reasoning; stays: whole reasonings that stay in their language; agree: those from "
        "which the second model derived the same call."
    )

    def __init__(self, config: BackfillRun) -> None:
        """ConfigError if an API key is not set."""
        self.config = config
        self._writer = Endpoint(config.writer, name="writer")
        self._checker = Endpoint(config.checker, name="checker")
        self.endpoints: Sequence[Endpoint] = (self._writer, self._checker)
        self.live: Counter[str] = Counter()

    def settings(self) -> dict[str, Any]:
        """All that answers depend on besides the row."""
        config = self.config
        return {
            "kind": config.kind,
            "seed": config.seed,
            "writer": {"model": config.writer.model, "extra_body": config.writer.extra_body},
            "writer_sampling": config.writer_sampling.model_dump(),
            "checker": {"model": config.checker.model, "extra_body": config.checker.extra_body},
            "checker_sampling": config.checker_sampling.model_dump(),
            "checker_answers": config.checker_answers,
            "thinking_close": config.thinking_close,
            "instructions": digest([shipped_texts(language)["backfill"] for language in SHIPPED]),
        }

    def parse(self, source: str, row: Mapping[str, Any]) -> SourceRow:
        """A row whose turns stay. DataError if it is none."""
        return whole_row(source, row, self.config)

    async def check(self) -> list[str]:
        """EndpointError if one of the models is not served."""
        for endpoint in self.endpoints:
            await endpoint.check()
        return []

    def jobs(self, row: SourceRow, journal: Journal, judge: LanguageJudge) -> Iterator[tuple[str, Job]]:
        """Per turn one job, whose key is that of the check; what the writer wrote is kept under a key of its own."""
        for index in bare_turns(row.messages):
            written, key = journal.get(_write_key(row, index)), _check_key(row, index)
            is_over = key in journal or (written is not None and self._usable(row, index, written, judge)[1])
            if not _unaskable(row, index) and not is_over:
                yield key, partial(self._ask, row, index, journal, judge)

    def finish(self, row: SourceRow, journal: Journal, judge: LanguageJudge, tally: Tally) -> Outcome:
        """The row with the reasonings that hold, and one record for each that does not."""
        messages, dropped, filled = list(row.messages), [], []
        tally.add(row.language, row.domain, {"rows": 1})
        for index in bare_turns(row.messages):
            verdict = self._verdict(row, index, journal, judge)
            tally.add(row.language, row.domain, verdict.counts)
            if verdict.reason:
                record = {"source": row.source, "id": row.sample_id, "message": index, "reason": verdict.reason}
                dropped.append(record | verdict.details)
            elif verdict.reasoning:
                messages[index] = {**messages[index], "reasoning_content": verdict.reasoning}
                filled.append(index)
        return Outcome(output_row(row, messages, backfilled=filled), dropped)

    async def _ask(self, row: SourceRow, index: int, journal: Journal, judge: LanguageJudge) -> dict[str, Any] | None:
        """The checker's answer; None if what was written is not worth checking."""
        if (written := journal.get(_write_key(row, index))) is None:
            written = await self._write(row, index, judge)
            journal.put(_write_key(row, index), written)
        reasoning, reason, _ = self._usable(row, index, written, judge)
        if reason:
            return None
        answer = await self._checker.chat(
            checker_messages(row, reasoning, as_json=self.config.checker_answers == "json"),
            tools=row.tools if self.config.checker_answers == "tool_calls" else (),
            **self._sampling(self.config.checker_sampling, row, index),
        )
        agrees = self._derived(answer)[0] == canonical_calls(row.messages[index]["tool_calls"])
        self.live.update({"checked": 1, "agreed": int(agrees)})
        return {"completion": msgspec.to_builtins(answer)}

    async def _write(self, row: SourceRow, index: int, judge: LanguageJudge) -> dict[str, Any]:
        sampling = self._sampling(self.config.writer_sampling, row, index)
        completion = await self._writer.chat(writer_messages(row, index), **sampling)
        text, _ = without_reasoning(completion, self.config.thinking_close)
        (letters,) = await judge.letters_of(text)
        return {"completion": msgspec.to_builtins(completion), "letters": letters, "judge": judge.identity}

    def _sampling(self, sampling: SamplingConfig, row: SourceRow, index: int) -> dict[str, Any]:
        seed = xxhash.xxh3_64_intdigest(f"{self.config.seed}/{row.key}/{index}".encode()) % 2**31
        return {**sampling.model_dump(), "seed": seed}

    def _usable(
        self, row: SourceRow, index: int, written: Mapping[str, Any], judge: LanguageJudge
    ) -> tuple[str, str, dict[str, int]]:
        """(reasoning, why it is not worth checking, language counts)."""
        text, problem = without_reasoning(Completion(**written["completion"]), self.config.thinking_close)
        if problem:
            return text, problem, {}
        letters = written["letters"] if written["judge"] == judge.identity else judge.letters(text)
        min_share = self.config.language.min_share
        counts, share = language_counts(letters, row.language, min_share), language_share(letters, row.language)
        if share is not None and share < min_share:
            return text, OTHER_LANGUAGE, counts
        return text, QUOTES_CALL if quotes_a_call(text, row.messages[index]["tool_calls"]) else "", counts

    def _derived(self, completion: Completion) -> tuple[list[str] | None, str]:
        """(canonical calls that the checker would make, why there are none)."""
        text, problem = without_reasoning(completion, self.config.thinking_close)
        if self.config.checker_answers == "tool_calls":
            calls, problem = completion.tool_calls, "" if problem == EMPTY else problem
        else:
            calls = calls_in_text(text)
        derived = None if calls is None or problem else canonical_calls(calls)
        return derived, problem or (MALFORMED if derived is None else "")

    def _verdict(self, row: SourceRow, index: int, journal: Journal, judge: LanguageJudge) -> "_Verdict":
        if reason := _unaskable(row, index):
            return _refused(reason, {})
        written = journal.get(_write_key(row, index))
        if written is None:
            return _Verdict(counts={"turns": 1, "failed": 1})
        reasoning, reason, counts = self._usable(row, index, written, judge)
        counts |= {"turns": 1, "written": 1, "tokens": written["completion"]["num_tokens"]}
        if reason:
            return _refused(reason, counts, reasoning=reasoning)
        checked = journal.get(_check_key(row, index))
        if checked is None:
            return _Verdict(counts=counts | {"failed": 1})
        completion = Completion(**checked["completion"])
        expected = canonical_calls(row.messages[index]["tool_calls"])
        derived, reason = self._derived(completion)
        counts |= {"checked": 1, "agreed": int(derived == expected), "tokens": counts["tokens"] + completion.num_tokens}
        if derived == expected:
            return _Verdict(reasoning=reasoning, counts=counts | {"kept": 1})
        shown = completion.text if derived is None else derived
        return _refused(reason or OTHER_CALL, counts, reasoning=reasoning, expected=expected, derived=shown)


@dataclass(frozen=True)
class _Verdict:
    """What came of one turn; neither reasoning nor reason: its requests failed, the next run asks again."""

    counts: dict[str, int]
    reasoning: str = ""
    reason: str = ""
    """Why the reasoning is dropped."""
    details: dict[str, Any] = field(default_factory=dict)


def _refused(reason: str, counts: Mapping[str, int], **details: Any) -> _Verdict:
    return _Verdict(counts={"turns": 1, **counts, f"{DROPPED}{reason}": 1}, reason=reason, details=details)


def _unaskable(row: SourceRow, index: int) -> str:
    """Why nobody can be asked about a turn; empty if it can be asked about."""
    if not row.tools:
        return NO_TOOLS
    return BROKEN_CALL if canonical_calls(row.messages[index]["tool_calls"]) is None else ""


def bare_turns(messages: Sequence[Message]) -> list[int]:
    """Numbers of the assistant messages that call tools without any reasoning."""
    return [
        index
        for index, message in enumerate(messages)
        if message["role"] == "assistant"
        and message.get("tool_calls")
        and not (message.get("reasoning_content") or "").strip()
    ]


def writer_messages(row: SourceRow, index: int) -> list[Message]:
    """What the writer sees: tools, the conversation before the turn, and its calls."""
    told = instruction(row.language, "writer").format(language=language_name(row.language))
    shown = "\n\n".join(_transcript(message) for message in row.messages[:index])
    request = instruction(row.language, "request").format(calls=_shown_calls(row.messages[index]))
    asked = f"<tools>\n{json.dumps(row.tools, ensure_ascii=False)}\n</tools>\n\n{shown}\n\n{request}"
    return [{"role": "system", "content": told}, {"role": "user", "content": asked}]


def checker_messages(row: SourceRow, reasoning: str, *, as_json: bool) -> list[Message]:
    """What the checker sees: the reasoning, and the tools, which go into the request where calls are to be calls."""
    told = instruction(row.language, "checker")
    if as_json:
        tools = json.dumps(row.tools, ensure_ascii=False)
        told += "\n\n" + instruction(row.language, "answer").format(tools=tools)
    return [{"role": "system", "content": told}, {"role": "user", "content": reasoning}]


def quotes_a_call(text: str, calls: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a text has the arguments of a call as JSON: then anyone derives the call, whatever was thought."""
    parsed = [parsed_call(call) for call in calls]
    arguments = {canonical(call["function"]["arguments"]) for call in parsed if call} - {"{}"}
    return any(canonical(value) in arguments for value in _objects_in(text))


def _objects_in(text: str) -> Iterator[Any]:
    """JSON objects anywhere in a text."""
    for found in re.finditer(r"\{", text):
        try:
            yield json.JSONDecoder().raw_decode(text, found.start())[0]
        except (ValueError, RecursionError):
            continue


def _transcript(message: Message) -> str:
    text = message.get("content") or ""
    calls = f"\n{_shown_calls(message)}" if message.get("tool_calls") else ""
    return f"<{message['role']}>\n{text}{calls}\n</{message['role']}>"


def _shown_calls(message: Message) -> str:
    calls = [call.get("function", call) for call in message["tool_calls"]]
    named = [{"name": call["name"], "arguments": call.get("arguments", {})} for call in calls]
    return json.dumps(named, ensure_ascii=False)


def _write_key(row: SourceRow, index: int) -> str:
    return f"{row.key}/{index}/write"


def _check_key(row: SourceRow, index: int) -> str:
    return f"{row.key}/{index}/check"
