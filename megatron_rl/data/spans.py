"""What rendering gives: tokens, which of them are trained, and for every token why."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import numpy as np

from megatron_rl.data.locate import Located
from megatron_rl.data.marks import Piece
from megatron_rl.data.parts import Part
from megatron_rl.data.turns import TokenizedText, TurnSpan, end_token, token_at, token_within

SpanKind = Literal["context", "turn", "reasoning", "answer", "tool_call", "end_of_turn"]
"""context: not written by the assistant. turn: an assistant's turn up to its end-of-turn token, where nothing asks for
its parts; else reasoning (with the template's marks around it), answer and one tool_call per call."""

TEMPLATE = "chat template"
"""Reason of text that belongs to no message."""

Fate = Callable[[int, SpanKind, int], tuple[bool, str]]
"""(message, kind, call) -> whether such a part of the assistant's turn is trained, and why."""


@dataclass(frozen=True)
class TokenSpan:
    """Consecutive tokens of one conversation with one fate; a list of them covers every token once, in order."""

    start: int
    """First token."""
    end: int
    """Token behind the last one."""
    kind: SpanKind
    trained: bool
    """Whether the loss counts these tokens."""
    reason: str
    """Why they are trained, or why not, for people to read."""


@dataclass(frozen=True)
class Rendered:
    """One conversation as the model reads it."""

    tokens: TokenizedText
    """Text, tokens and which characters each of them stands for."""
    loss_mask: np.ndarray
    """bool [T]; token 0 is False, as it has no predecessor. All False where a mask leaves nothing of the turns."""
    spans: list[TokenSpan]
    """Cover every token once, in order."""
    effort: str | None = None
    """What the template was told as reasoning_effort; None: nothing."""
    not_rendered: tuple[str, ...] = ()
    """Texts that the template leaves out, such as messages[1].reasoning_content; only known where parts are."""

    @property
    def token_ids(self) -> np.ndarray:
        """int32 [T]"""
        return self.tokens.token_ids


def turn_spans(
    tokens: TokenizedText,
    turns: Sequence[TurnSpan],
    stop_token_ids: Sequence[int],
    *,
    fate: Fate,
    parts: Sequence[Sequence[Part]] | None,
) -> list[list[TokenSpan]]:
    """Spans of each turn, its end-of-turn token the last. DataError if a token reaches over a border.

    Without parts a turn is one span in front of its end-of-turn token.
    """
    found = []
    for number, turn in enumerate(turns):
        begin, end = token_at(tokens, turn.start), end_token(tokens, turn, stop_token_ids)
        if parts is None:
            starts: list[tuple[int, SpanKind, int]] = [(begin, "turn", 0)]
        else:
            starts = [(token_within(tokens, part.earliest, part.start), part.kind, part.call) for part in parts[number]]
        edges = [start for start, _, _ in starts] + [end]
        spans = [
            TokenSpan(start, edges[i + 1], kind, *fate(turn.message, kind, call))
            for i, (start, kind, call) in enumerate(starts)
        ]
        spans.append(TokenSpan(end, end + 1, "end_of_turn", *fate(turn.message, "end_of_turn", 0)))
        found.append([span for span in spans if span.start < span.end])
    return found


def cover(
    tokens: TokenizedText, of_turns: Sequence[Sequence[TokenSpan]], borders: Sequence[tuple[int, str]] | None
) -> list[TokenSpan]:
    """The spans of the turns and, in between, those of what the assistant did not write. Token 0 is never trained.

    borders are characters where a message starts that is not the assistant's, and what to call it; None: not known.
    """
    spans: list[TokenSpan] = []
    for of_turn in [*of_turns, []]:
        behind = spans[-1].end if spans else 0
        until = of_turn[0].start if of_turn else len(tokens.token_ids)
        spans += _context(tokens, behind, until, borders)
        spans += of_turn
    if spans and spans[0].trained:
        first = spans[0]
        spans[:1] = [replace(first, end=1, trained=False, reason="the first token has nothing that predicts it")]
        spans[1:1] = [replace(first, start=1)] if first.end > 1 else []
    return spans


def context_borders(located: Located, stop_texts: Sequence[str]) -> list[tuple[int, str]]:
    """(character, name) in order, for each stretch that is not the assistant's; for people, not for masks.

    A message starts behind the end-of-turn token of the one before it, or behind its text if it has none.
    """
    text, pieces = located.text, located.pieces or {}
    of_message = {turn.message: turn for turn in located.turns}
    borders, behind = [(0, TEMPLATE)], 0
    for index, message in enumerate(located.messages):
        extent = pieces.get(Piece(index, "content"))
        if turn := of_message.get(index):
            prompt = turn.start - len(located.header)
            if located.header and text.startswith(located.header, max(prompt, 0)):
                borders.append((prompt, "generation prompt"))
            behind = turn.end_of_turn
            borders.append((behind, TEMPLATE))
        elif extent and message["role"] != "assistant":
            start = _message_start(text[behind : extent.start], stop_texts)
            borders.append((behind + start, f"messages[{index}], {message['role']}"))
            behind = extent.end
    return borders


def loss_mask(spans: Sequence[TokenSpan]) -> np.ndarray:
    """bool [T]"""
    trained = np.array([span.trained for span in spans], dtype=bool)
    return np.repeat(trained, [span.end - span.start for span in spans])


def _message_start(between: str, stop_texts: Sequence[str]) -> int:
    """Where the next message starts in what lies between the texts of two."""
    for stop in stop_texts:
        _, found, tail = between.partition(stop)
        if found and tail.strip():
            return len(between) - len(tail.lstrip())
    return 0


def _context(tokens: TokenizedText, begin: int, end: int, borders: Sequence[tuple[int, str]] | None) -> list[TokenSpan]:
    """Spans of tokens begin to end, cut at the borders."""
    if begin == end:
        return []
    if borders is None:
        return [TokenSpan(begin, end, "context", False, "not the assistant's")]
    indices = np.searchsorted(tokens.starts, [character for character, _ in borders]).tolist()
    names: dict[int, str] = {}
    for index, (_, name) in zip(indices, borders, strict=True):
        if index < end:
            names[max(begin, index)] = name
    edges = [*sorted(names), end]
    return [TokenSpan(a, b, "context", False, names[a]) for a, b in pairwise(edges)]
