"""Where the assistant's turns lie in a rendered conversation, and where a turn's parts meet: characters, then tokens.

A turn is trained from its first answer token, the one behind the generation prompt, to its end-of-turn token, both
included. Borders are found in the text and mapped to tokens by the offsets of the one tokenisation of the whole text;
no piece is ever tokenised by itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_rl.config import DataError
from megatron_rl.data.marks import SPAN_CURE, Extent, MarkedMessages, Message, Piece, Render, common_prefix, unused_word


@dataclass(frozen=True)
class TurnSpan:
    """One assistant turn in the rendered text."""

    message: int
    start: int
    """Character where the answer starts."""
    end_of_turn: int
    """Character where the end-of-turn token starts."""


@dataclass(frozen=True)
class TokenizedText:
    """One text and its only tokenisation."""

    text: str
    token_ids: np.ndarray
    """int32 [T]"""
    starts: np.ndarray
    """int32 [T]: first character of each token."""
    ends: np.ndarray
    """int32 [T]: character behind each token."""


def marked_turns(
    text: str, blocks: Sequence[tuple[int, int]], stop_texts: Sequence[str], turn_messages: Sequence[int]
) -> list[TurnSpan]:
    """Turns from the character spans of a template's {% generation %} blocks, one block per assistant message.

    The end-of-turn token may stand at the end of a block, whitespace behind it left aside, or right after the block.
    """
    if len(blocks) != len(turn_messages):
        raise DataError(
            f"a chat template must put one {{% generation %}} block around each assistant message, "
            f"got {len(blocks)} blocks for {len(turn_messages)} messages; mend the template"
        )
    turns = []
    for message, (start, end) in zip(turn_messages, blocks, strict=True):
        follows = text.startswith(tuple(stop_texts), end)
        end_of_turn = end if follows else last_stop(text, start, end, stop_texts)
        if end_of_turn is None:
            raise DataError(_no_end_of_turn(text[start:end], stop_texts))
        turns.append(TurnSpan(message, start, end_of_turn))
    return turns


@dataclass(frozen=True)
class HeaderTurns:
    """Finds the turns of a template without {% generation %} blocks.

    A turn starts behind the last generation prompt in front of its first piece and ends at the first stop text behind
    its last one: in between there is nothing but what the template itself writes. So it does not matter whether the
    template looks at later messages, as those do that drop the reasoning of earlier turns.
    """

    text: str
    messages: Sequence[Message]
    render: Render
    header: str
    """The generation prompt."""
    stop_texts: Sequence[str]

    def find(self, pieces: Mapping[Piece, Extent]) -> list[TurnSpan]:
        """Turns in order. DataError for one that does not begin with the header or does not end in a stop text."""
        by_message: dict[int, list[Extent]] = {}
        for piece, extent in pieces.items():
            by_message.setdefault(piece.message, []).append(extent)
        turns: list[TurnSpan] = []
        behind = 0
        for index, message in enumerate(self.messages):
            own = by_message.get(index)
            if message["role"] == "assistant":
                first, last = (min(p.start for p in own), max(p.end for p in own)) if own else self._place(index)
                start = self._start(index, first, behind=behind, before=turns[-1:])
                turns.append(TurnSpan(index, start, self._end_of_turn(start, last)))
                behind = turns[-1].end_of_turn
            elif own:
                behind = max(p.end for p in own)
        return turns

    def _start(self, index: int, first: int, *, behind: int, before: Sequence[TurnSpan]) -> int:
        """Behind the last header between two characters: the end of what is known, and the turn's first piece."""
        found = self.text.rfind(self.header, behind, first)
        if found >= 0:
            return found + len(self.header)
        for turn in before:
            if (end := self.text.rfind(self.header, turn.start, first)) >= 0:
                raise DataError(_no_end_of_turn(self.text[turn.start : end], self.stop_texts))
        raise DataError(
            f"the chat template cannot give exact assistant spans: messages[{index}] must begin with the generation "
            f"prompt {self.header!r}, but it has {self.text[max(behind, first - 40) : first]!r} there; {SPAN_CURE}"
        )

    def _end_of_turn(self, start: int, last: int) -> int:
        stops = [at for stop in self.stop_texts if (at := self.text.find(stop, last)) >= 0]
        if not stops:
            raise DataError(_no_end_of_turn(self.text[start:], self.stop_texts))
        return min(stops)

    def _place(self, index: int) -> tuple[int, int]:
        """Where content would stand in a turn of which nothing is rendered, twice."""
        word = unused_word(self.text)
        filled = MarkedMessages(self.messages, word=word, margin="", context=False, fill=[index])
        only = [m if i == index else self.messages[i] for i, m in enumerate(filled.messages)]
        rendered = self.render(only)
        if word not in rendered:
            raise DataError(
                f"the chat template cannot give exact assistant spans: it leaves out messages[{index}]; {SPAN_CURE}"
            )
        at = common_prefix(self.text, rendered)
        return at, at


def last_stop(text: str, start: int, end: int, stop_texts: Sequence[str]) -> int | None:
    """Character of the stop text that ends text[start:end], trailing whitespace left aside; None without one."""
    body_end = start + len(text[start:end].rstrip())
    at = [body_end - len(stop) for stop in stop_texts if text.endswith(stop, start, body_end)]
    return min(at, default=None)


def token_at(tokens: TokenizedText, character: int) -> int:
    """Index of the token that starts at a character; DataError if there is none, or if one reaches over it."""
    index = int(np.searchsorted(tokens.starts, character))
    reached = int(tokens.ends[index - 1]) if index else 0
    if index == len(tokens.starts) or tokens.starts[index] != character or reached > character:
        near = tokens.text[max(0, character - 12) : character], tokens.text[character : character + 12]
        raise DataError(
            f"a token must start where the chat template's text and the assistant's meet, but one reaches over the "
            f"border between {near[0]!r} and {near[1]!r}; change the whitespace or the character there"
        )
    return index


def token_within(tokens: TokenizedText, first: int, last: int) -> int:
    """Index of a token that starts at last or, failing that, before it but not before first; DataError without one.

    For borders with whitespace between first and last, which a token may share with either side.
    """
    for character in range(last, first, -1):
        index = int(np.searchsorted(tokens.starts, character))
        if index < len(tokens.starts) and tokens.starts[index] == character and tokens.ends[index - 1] <= character:
            return index
    return token_at(tokens, first)


def end_token(tokens: TokenizedText, turn: TurnSpan, stop_token_ids: Sequence[int]) -> int:
    """Index of a turn's end-of-turn token."""
    index = token_at(tokens, turn.end_of_turn)
    if tokens.token_ids[index] not in stop_token_ids:
        raise DataError(
            f"an assistant turn must end in one of the tokens {list(stop_token_ids)}, "
            f"got token {tokens.token_ids[index]} at character {turn.end_of_turn} of the rendered text; {SPAN_CURE}"
        )
    return index


def _no_end_of_turn(turn: str, stop_texts: Sequence[str]) -> str:
    return (
        f"an assistant turn must end in one of {list(stop_texts)}, the chat template gives {turn[-40:]!r}; add its "
        f"end-of-turn token to eos_token_id in the model's generation_config.json"
    )
