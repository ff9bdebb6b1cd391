"""Prefill distillation: the teacher's reasoning is opened with a phrase, and kept if it stays in its language."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import xxhash

from megatron_rl.config import DataError
from megatron_rl.data.distill.answer import SPECIAL, Answer, split_answer
from megatron_rl.data.distill.config import LocalPrefill, NoPrefill, PrefillRun
from megatron_rl.data.distill.language import LanguageJudge, language_share
from megatron_rl.data.distill.opening import LocalPrompt, check_chat_prefill
from megatron_rl.data.distill.phrases import draw_phrase, load_phrases
from megatron_rl.data.distill.rows import SourceRow, digest, output_row, prompt_of
from megatron_rl.data.distill.tally import DROPPED, Tally, language_counts
from megatron_rl.data.distill.task import Outcome
from megatron_rl.data.endpoint import Completion, Endpoint, EndpointError
from megatron_rl.data.journal import Job, Journal

OTHER_LANGUAGE = "not in its language"


class PrefillTask:
    """One answer per row."""

    columns: Sequence[tuple[str, str]] = (
        ("rows", "rows"),
        ("kept", "kept"),
        ("stays", "in_language_share"),
        ("letters", "letters_share"),
        ("answers", "answers_in_language_share"),
        ("dropped", "dropped"),
        ("tokens", "tokens"),
    )
    caption = (
        "stays: whole reasonings that stay in their language; letters: share of all their letters that are in it; "
        "answers: whole answers in it. The phrase itself is not judged."
    )

    def __init__(self, config: PrefillRun) -> None:
        """ConfigError if the phrases, the tokenizer or the API key do not fit."""
        self.config = config
        self._phrases = load_phrases(config.phrases)
        self._local = LocalPrompt(config.prefill, config.thinking) if isinstance(config.prefill, LocalPrefill) else None
        self._teacher = Endpoint(config.teacher, name="teacher")
        self.endpoints: Sequence[Endpoint] = (self._teacher,)
        self.live: Counter[str] = Counter()

    def settings(self) -> dict[str, Any]:
        """All that answers depend on besides the row."""
        config = self.config
        return {
            "kind": config.kind,
            "seed": config.seed,
            "teacher": {"model": config.teacher.model, "extra_body": config.teacher.extra_body},
            "sampling": config.sampling.model_dump(),
            "prefill": config.prefill.model_dump(),
            "thinking.open": config.thinking.open,
            "phrases": digest([[*key, list(phrases)] for key, phrases in sorted(self._phrases.items())]),
        }

    def parse(self, source: str, row: Mapping[str, Any]) -> SourceRow:
        """A row to be answered. DataError if it is none, or there are no phrases for it."""
        parsed = prompt_of(source, row, self.config)
        if not isinstance(self.config.prefill, NoPrefill) and (parsed.language, parsed.domain) not in self._phrases:
            known = ", ".join(f"{language}/{domain}" for language, domain in sorted(self._phrases))
            raise DataError(
                f"{source}: language and domain must have phrases, got {parsed.language}/{parsed.domain}, there are "
                f"{known}; add a file to `phrases`, or change the row's columns"
            )
        return parsed

    async def check(self) -> list[str]:
        """Notes about the endpoint. EndpointError or ConfigError if it cannot do what is asked."""
        await self._teacher.check()
        if self.config.prefill.kind != "chat" or await check_chat_prefill(self._teacher, self.config.thinking):
            return []
        return [
            f"{self.config.teacher.url} does not show its prompts: whether its chat template leaves an unfinished "
            "message as it is was not checked; with prefill.kind=local it is certain"
        ]

    def jobs(self, row: SourceRow, journal: Journal, judge: LanguageJudge) -> Iterator[tuple[str, Job]]:
        """The one request of a row, if it is not answered."""

        async def job() -> dict[str, Any]:
            completion = await self._ask(row)
            answer = self._answer(row, completion)
            reasoning, content = await judge.letters_of(answer.reasoning, answer.content)
            value = {"reasoning_letters": reasoning, "content_letters": content, "judge": judge.identity}
            self.live.update(self._counts(row, answer, value))
            return {"completion": msgspec.to_builtins(completion), **value}

        if row.key not in journal:
            yield row.key, job

    def finish(self, row: SourceRow, journal: Journal, judge: LanguageJudge, tally: Tally) -> Outcome:
        """The row with its new answer, or why it has none."""
        value = journal.get(row.key)
        if value is None:
            tally.add(row.language, row.domain, {"rows": 1, "failed": 1})
            return Outcome(None)
        completion = Completion(**value["completion"])
        answer = self._answer(row, completion)
        if value["judge"] != judge.identity:
            value["reasoning_letters"] = judge.letters(answer.reasoning)
            value["content_letters"] = judge.letters(answer.content)
        counts, share = self._counts(row, answer, value), language_share(value["reasoning_letters"], row.language)
        reason = answer.problem
        if not reason and share is not None and share < self.config.language.min_share:
            reason = OTHER_LANGUAGE
        counts |= {"rows": 1, "tokens": completion.num_tokens, f"{DROPPED}{reason}" if reason else "kept": 1}
        tally.add(row.language, row.domain, counts)
        reasoning = (self._phrase(row) + answer.reasoning).strip()
        if reason:
            record = {"source": row.source, "id": row.sample_id, "reason": reason, "language_share": share}
            texts = {"reasoning_content": reasoning, "content": answer.content or completion.text}
            return Outcome(None, [record | texts])
        turn: dict[str, Any] = {"role": "assistant", "reasoning_content": reasoning, "content": answer.content}
        if answer.tool_calls:
            turn["tool_calls"] = answer.tool_calls
        extra = {"phrase": self._phrase(row), "language_share": share}
        return Outcome(output_row(row, [*row.messages, turn], **extra))

    async def _ask(self, row: SourceRow) -> Completion:
        sampling = self.config.sampling.model_dump()
        sampling["seed"] = xxhash.xxh3_64_intdigest(f"{self.config.seed}/{row.key}".encode()) % 2**31
        phrase = self._phrase(row)
        if self._local is not None:
            completion = await self._teacher.complete(self._local_ids(self._local, row), **sampling)
            return replace(completion, text=self._local.answer_text(completion.text))
        prefill = self.config.thinking.open + phrase if phrase else None
        return await self._teacher.chat(row.messages, tools=row.tools, prefill=prefill, **sampling)

    def _phrase(self, row: SourceRow) -> str:
        """What opens the row's reasoning; nothing for the baseline."""
        if isinstance(self.config.prefill, NoPrefill):
            return ""
        return draw_phrase(
            self._phrases,
            language=row.language,
            domain=row.domain,
            seed=self.config.seed,
            sample_id=row.sample_id,
        )

    def _answer(self, row: SourceRow, completion: Completion) -> Answer:
        phrase = self._phrase(row)
        answer = split_answer(completion, self.config.thinking, self.config.thinking.open if phrase else "", phrase)
        if self._local is not None and not answer.problem and self._local.has_special_token(completion.text):
            return replace(answer, problem=SPECIAL)
        return answer

    def _local_ids(self, local: LocalPrompt, row: SourceRow) -> list[int]:
        """Token ids to continue. EndpointError, so that other rows go on, if the template refuses this one."""
        try:
            return local.ids(row.messages, row.tools, self._phrase(row))
        except DataError as error:
            raise EndpointError(f"{row.source}: {error}", url=self.config.teacher.url) from error

    def _counts(self, row: SourceRow, answer: Answer, value: Mapping[str, Any]) -> dict[str, int]:
        """Of an answer that is whole: one cut off says little about where its language would have gone."""
        if answer.problem:
            return {}
        min_share = self.config.language.min_share
        counts = language_counts(value["reasoning_letters"], row.language, min_share)
        of_answer = language_counts(value["content_letters"], row.language, min_share)
        return counts | {
            "answers_judged": of_answer["judged"],
            "answers_in_language": of_answer["in_language"],
        }
