"""Conversations as people look at them: which tokens are trained and why, for the terminal and for a page."""

import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

KINDS = ("reasoning", "answer", "tool_call", "end_of_turn", "turn", "context")
"""Kinds of spans, in the order of tables."""
_INVISIBLE = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}
"""Unicode categories of characters that show nothing, or steer what shows the others."""
_JOINER = "\u200d"


@dataclass(frozen=True)
class ShownToken:
    """One token, or those that share a character and can only be shown together."""

    ids: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class ShownSpan:
    """Consecutive tokens of one fate."""

    start: int
    """First token."""
    kind: str
    trained: bool
    reason: str
    tokens: tuple[ShownToken, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of the span."""
        return sum(len(token.ids) for token in self.tokens)


@dataclass(frozen=True)
class ShownConversation:
    """One row."""

    source: str
    spans: tuple[ShownSpan, ...] = ()
    effort: str | None = None
    not_rendered: tuple[str, ...] = ()
    """Texts that the chat template left out."""
    error: str = ""
    """Why there are no spans."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the conversation."""
        return sum(span.num_tokens for span in self.spans)

    @property
    def num_trained(self) -> int:
        """Tokens that the loss counts."""
        return sum(span.num_tokens for span in self.spans if span.trained)

    @property
    def summary(self) -> str:
        """Counts in one line."""
        parts = [
            f"{self.num_tokens:,} tokens",
            f"{self.num_trained:,} trained ({share(self.num_trained, self.num_tokens)})",
        ]
        return ", ".join([*parts, *([f"effort {self.effort}"] if self.effort else [])])


@dataclass(frozen=True)
class Total:
    """Tokens of one kind over several conversations."""

    kind: str
    trained: int
    masked: int


def totals(conversations: Sequence[ShownConversation]) -> list[Total]:
    """One per kind that occurs."""
    counts: Counter[tuple[str, bool]] = Counter()
    for conversation in conversations:
        for span in conversation.spans:
            counts[span.kind, span.trained] += span.num_tokens
    return [
        Total(kind, counts[kind, True], counts[kind, False])
        for kind in KINDS
        if counts[kind, True] or counts[kind, False]
    ]


def share(part: int, whole: int) -> str:
    """Percent, without a fraction."""
    return f"{part / whole:.0%}" if whole else "0%"


def visible(text: str) -> str:
    """Text in which nothing is invisible or steers the terminal: newlines get an arrow, the rest stands as <U+200B>.

    A zero-width joiner stays, as emoji are made with it.
    """
    return "".join(_visible(character) for character in text)


def _visible(character: str) -> str:
    if character == "\n":
        return "↵\n"
    if character == "\t":
        return "⇥\t"
    if character != _JOINER and unicodedata.category(character) in _INVISIBLE:
        return f"<U+{ord(character):04X}>"
    return character
