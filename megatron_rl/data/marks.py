"""Where a chat template puts the pieces of a conversation: found by marks, never by searching for the pieces.

A copy of the messages with a made-up word at each border of each piece is rendered beside the messages themselves. If
taking those words out again gives the very text without them, each stood where its border is.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

from megatron_rl.config import DataError

Message = dict[str, Any]
Render = Callable[[Sequence[Message]], str]
PieceKind = Literal["reasoning", "content", "call"]

SPAN_CURE = "put {% generation %} and {% endgeneration %} around the assistant's text in the chat template"
MARGINS = ("", "\n", None)
"""What a template may strip off a piece: nothing, newlines, all whitespace. Marks stand inside of it."""


@dataclass(frozen=True)
class Piece:
    """A text of one message that a template may put somewhere."""

    message: int
    kind: PieceKind
    call: int = 0
    """Which call of the message."""


@dataclass(frozen=True)
class Extent:
    """Characters of the rendered text, end excluded; of a call those from its name to its last argument."""

    start: int
    end: int


def find_pieces(
    text: str,
    messages: Sequence[Message],
    render: Render,
    *,
    context: bool = False,
    margins: Sequence[str | None] = MARGINS,
) -> dict[Piece, Extent]:
    """Where the assistant's pieces lie in text, which is render(messages); with context also everyone's contents.

    Pieces that are empty or that the template leaves out are missing. margins are tried in order. DataError if with
    each of them the marks change anything else.
    """
    word, problem, tried = unused_word(text), "", []
    for names, margin in product((True, False), margins):
        marked = MarkedMessages(messages, word=word, margin=margin, context=context, names=names)
        if marked.messages in tried:
            continue
        tried.append(marked.messages)
        try:
            clean, pieces = marked.read(render(marked.messages))
            if clean == text:
                return pieces
            found = _difference(text, clean)
        except DataError as error:
            found = str(error)
        problem = problem or found
    raise DataError(f"the chat template cannot give exact assistant spans: {problem}; {SPAN_CURE}")


def unused_word(text: str) -> str:
    """Letters that do not occur in a text."""
    word = "qmarkx"
    while word in text:
        word += "x"
    return word


class MarkedMessages:
    """Copies of messages with marks.

    names: mark the names of calls too, at which some templates look.
    fill: assistant messages whose content gets a lone mark in place of the answer, which shows where that would stand.
    """

    def __init__(
        self,
        messages: Sequence[Message],
        *,
        word: str,
        margin: str | None,
        context: bool,
        names: bool = True,
        fill: Sequence[int] = (),
    ) -> None:
        self._word, self._margin, self._names = word, margin, names
        self._places: list[Piece] = []
        self.messages = [
            self._message(index, message, fill=index in fill)
            if message["role"] == "assistant"
            else {**message, "content": self._marked(message["content"], Piece(index, "content"))}
            if context
            else message
            for index, message in enumerate(messages)
        ]

    def read(self, rendered: str) -> tuple[str, dict[Piece, Extent]]:
        """(the rendering without marks, where its pieces lie in it). DataError if a piece occurs twice or in part."""
        clean, edges, removed, at = [], {}, 0, 0
        for found in re.finditer(rf"{self._word}(\d+)z", rendered):
            clean.append(rendered[at : found.start()])
            edges.setdefault(int(found[1]), []).append(found.start() - removed)
            removed, at = removed + len(found[0]), found.end()
        positions: dict[Piece, list[list[int]]] = {}
        for number, piece in enumerate(self._places):
            positions.setdefault(piece, []).append(edges.get(number, []))
        extents = {piece: _extent(piece, found) for piece, found in positions.items() if any(found)}
        return "".join([*clean, rendered[at:]]), extents

    def _mark(self, piece: Piece) -> str:
        self._places.append(piece)
        return f"{self._word}{len(self._places) - 1}z"

    def _marked(self, text: str, piece: Piece) -> str:
        if not text.strip():
            return text
        core = text.strip(self._margin)
        start = text.index(core)
        return f"{text[:start]}{self._mark(piece)}{core}{self._mark(piece)}{text[start + len(core) :]}"

    def _message(self, index: int, message: Message, *, fill: bool) -> Message:
        marked = dict(message)
        reasoning, content = message.get("reasoning_content"), message["content"]
        if isinstance(reasoning, str):
            marked["reasoning_content"] = self._marked(reasoning, Piece(index, "reasoning"))
        opening, thought, closing, answer = ("", "", "", content) if isinstance(reasoning, str) else _split(content)
        before = opening + self._marked(thought, Piece(index, "reasoning")) + closing
        place = Piece(index, "content")
        marked["content"] = before + (self._mark(place) if fill else self._marked(answer, place))
        if calls := message.get("tool_calls"):
            marked["tool_calls"] = [self._call(Piece(index, "call", number), call) for number, call in enumerate(calls)]
        return marked

    def _call(self, piece: Piece, call: Message) -> Message:
        if "function" in call:
            return {**call, "function": self._call(piece, call["function"])}
        name = self._mark(piece) if self._names else ""
        return {**call, "name": name + call["name"], "arguments": self._leaves(call["arguments"], piece)}

    def _leaves(self, value: Any, piece: Piece) -> Any:
        """Marks around each text, or behind the key of a value without: the template writes what is beyond them."""
        if isinstance(value, str):
            return self._mark(piece) + value + self._mark(piece)
        if isinstance(value, list):
            return [self._leaves(item, piece) for item in value]
        if isinstance(value, dict):
            return {
                key if isinstance(item, str) else key + self._mark(piece): self._leaves(item, piece)
                for key, item in value.items()
            }
        return value


def _extent(piece: Piece, found: Sequence[Sequence[int]]) -> Extent:
    """From the positions of each of a piece's marks."""
    if any(len(positions) > 1 for positions in found):
        raise DataError(f"it renders the {piece.kind} of messages[{piece.message}] twice")
    if piece.kind != "call" and not all(found):
        raise DataError(f"it renders only a part of the {piece.kind} of messages[{piece.message}]")
    positions = [at for once in found for at in once]
    return Extent(min(positions), max(positions))


def _split(content: str) -> tuple[str, str, str, str]:
    """(text up to <think>, reasoning, </think> and text up to another one, answer), as templates do that split content.

    Content without </think> is all answer.
    """
    head, tag, rest = content.partition("</think>")
    if not tag:
        return "", "", "", content
    opening, begun, thought = head.rpartition("<think>")
    more, ended, answer = rest.rpartition("</think>")
    return opening + begun, thought, tag + more + ended, answer


def _difference(text: str, clean: str) -> str:
    at = common_prefix(text, clean)
    return (
        f"with a word at the borders of each message it has {clean[at : at + 24]!r} where it had {text[at : at + 24]!r}"
    )


def common_prefix(a: str, b: str) -> int:
    """Number of characters with which both begin."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
