"""The parts of a turn: reasoning, answer and tool calls, as borders in the rendered text.

What the template writes around a part goes with it: the marks of the reasoning with the reasoning, the tags of a call
with the call. Whitespace where two parts meet may go with either.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_rl.config import DataError
from megatron_rl.data.marks import Extent, MarkedMessages, Message, Piece, Render, common_prefix, unused_word
from megatron_rl.data.turns import TurnSpan

PartKind = Literal["reasoning", "answer", "tool_call"]


@dataclass(frozen=True)
class Part:
    """Ends where the next part of the turn starts, the last one at the end-of-turn token."""

    kind: PartKind
    earliest: int
    """Character; between it and start is only whitespace."""
    start: int
    """Character where the part starts, unless a token reaches over it from earliest or later."""
    call: int = 0
    """Which call of the message."""


@dataclass(frozen=True)
class PartFinder:
    """Parts of the turns of one text, which is render(messages)."""

    text: str
    messages: Sequence[Message]
    render: Render
    header: str
    """The generation prompt."""
    pieces: Mapping[Piece, Extent]

    def find(self, turns: Sequence[TurnSpan]) -> list[list[Part]]:
        """For each turn its parts in order, the first at its start.

        DataError where the end of the reasoning cannot be told from what follows it.
        """
        bare = [turn.message for turn in turns if self._calls(turn) and not self._piece(turn, "content")]
        frames = self._frames(bare) if bare else {}
        return [self._parts(turn, frames.get(turn.message, "")) for turn in turns]

    def _parts(self, turn: TurnSpan, frame: str | None) -> list[Part]:
        reasoning, content = self._piece(turn, "reasoning"), self._piece(turn, "content")
        calls = self._calls(turn)
        if content:
            behind = content.start
        elif calls:
            behind = self._frame_end(turn, reasoning, frame)
        else:
            behind = turn.end_of_turn
        if reasoning and reasoning.end > behind:
            raise DataError(
                f"the chat template must write reasoning before the answer, but messages[{turn.message}] has it "
                "behind; mend the template"
            )
        if self.text[turn.start : behind].strip():
            parts = [Part("reasoning", turn.start, turn.start)]
        else:
            parts, behind = [], turn.start
        if content:
            parts.append(Part("answer", self._stripped(behind, turn.start), behind))
            behind = content.end
        parts += self._call_parts(turn, calls, parts, behind)
        return parts or [Part("answer", turn.start, turn.start)]

    def _call_parts(self, turn: TurnSpan, calls: Sequence[Extent], parts: Sequence[Part], behind: int) -> list[Part]:
        """The first call starts behind what precedes it, the others with the text with which the first one does."""
        if len(calls) > 1:
            self._check_names(turn, calls)
        found: list[Part] = []
        for number, call in enumerate(calls):
            lowest = calls[number - 1].end if number else parts[-1].start if parts else turn.start
            if number:
                opening, between = self.text[found[0].start : calls[0].start], self.text[lowest : call.start]
                behind = call.start - common_prefix(opening[::-1], between[::-1])
            if number or parts:
                space = len(self.text[behind : call.start]) - len(self.text[behind : call.start].lstrip())
                found.append(Part("tool_call", self._stripped(behind, lowest), behind + space, number))
            else:
                found.append(Part("tool_call", turn.start, turn.start))
        return found

    def _check_names(self, turn: TurnSpan, calls: Sequence[Extent]) -> None:
        """Where one call ends and the next one starts can be told only if the places of their names are known."""
        for call, extent in zip(self.messages[turn.message]["tool_calls"], calls, strict=True):
            name = call.get("function", call)["name"]
            if not self.text.startswith(name, extent.start):
                raise DataError(
                    f"the chat template must show where each tool call of messages[{turn.message}] starts, but it "
                    f"writes calls of {name!r} in a way of its own; write one call per message, or train all parts"
                )

    def _stripped(self, character: int, lowest: int) -> int:
        """Where the whitespace in front of a character starts."""
        return lowest + len(self.text[lowest:character].rstrip())

    def _frame_end(self, turn: TurnSpan, reasoning: Extent | None, frame: str | None) -> int:
        """Where the marks of the reasoning end in a turn that goes on with calls."""
        at = reasoning.end if reasoning else turn.start
        rest = self.text[at : self._calls(turn)[0].start]
        body = rest.lstrip()
        same = common_prefix(body, (frame or "").lstrip())
        if frame is None or (frame.lstrip()[same:]).strip():
            raise DataError(
                f"the chat template must close the reasoning of messages[{turn.message}] before its tool calls as it "
                f"does before an answer, but it writes {rest[:40]!r}; give that message content, or train all parts"
            )
        return at + len(rest) - len(body) + same

    def _frames(self, bare: Sequence[int]) -> dict[int, str | None]:
        """What the template writes between reasoning, or turn start, and content in turns with calls but no content.

        None where it leaves content out although there is reasoning.
        """
        filled = MarkedMessages(self.messages, word=unused_word(self.text), margin="", context=False, fill=bare)
        clean, pieces = filled.read(self.render(filled.messages))
        frames: dict[int, str | None] = {}
        for index in bare:
            content, reasoning = pieces.get(Piece(index, "content")), pieces.get(Piece(index, "reasoning"))
            if content is None:
                frames[index] = None if reasoning else ""
                continue
            header = clean.rfind(self.header, 0, content.start)
            start = reasoning.end if reasoning else header + len(self.header) if header >= 0 else content.start
            frames[index] = clean[start : content.start]
        return frames

    def _piece(self, turn: TurnSpan, kind: Literal["reasoning", "content"]) -> Extent | None:
        return self.pieces.get(Piece(turn.message, kind))

    def _calls(self, turn: TurnSpan) -> list[Extent]:
        """All calls of a turn, or none if the template leaves them out."""
        numbers = range(len(self.messages[turn.message].get("tool_calls") or []))
        calls = [extent for call in numbers if (extent := self.pieces.get(Piece(turn.message, "call", call)))]
        if calls and len(calls) != len(numbers):
            raise DataError(
                f"the chat template must render all tool calls of messages[{turn.message}], "
                f"got {len(calls)} of {len(numbers)}; mend the template"
            )
        return calls
