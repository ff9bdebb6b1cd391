"""Where the assistant's turns lie: character spans of a rendered conversation, then tokens.

A turn is trained from its first answer token to its end-of-turn token, both included. Spans are found in the text and
mapped to tokens by the offsets of the one tokenisation of the whole text; no piece is ever tokenised by itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_rl.config import DataError

Message = dict[str, Any]

_CURE = "put {% generation %} and {% endgeneration %} around the assistant's text in the chat template"


@dataclass(frozen=True)
class TurnSpan:
    """One assistant turn in the rendered text."""

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
    text: str, blocks: Sequence[tuple[int, int]], stop_texts: Sequence[str], num_turns: int
) -> list[TurnSpan]:
    """Turns from the character spans of a template's {% generation %} blocks, one block per assistant message.

    The end-of-turn token may stand at the end of a block, whitespace behind it left aside, or right after the block.
    """
    if len(blocks) != num_turns:
        raise DataError(
            f"a chat template must put one {{% generation %}} block around each assistant message, "
            f"got {len(blocks)} blocks for {num_turns} messages; mend the template"
        )
    turns = []
    for start, end in blocks:
        follows = text.startswith(tuple(stop_texts), end)
        end_of_turn = end if follows else last_stop(text, start, end, stop_texts)
        if end_of_turn is None:
            raise DataError(_no_end_of_turn(text[start:end], stop_texts))
        turns.append(TurnSpan(start, end_of_turn))
    return turns


def prefix_turns(
    text: str, messages: Sequence[Message], render: Callable[..., str], stop_texts: Sequence[str]
) -> list[TurnSpan]:
    """Turns of a template without {% generation %} blocks.

    A turn lies between render(what precedes it, add_generation_prompt=True) and render(everything up to it), which are
    both prefixes of the full text when the template renders a message without looking at later ones. If it does not,
    DataError: the spans would be guesses.
    """
    turns = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = render(messages[:index], add_generation_prompt=True)
        _check_prefix(text, before, f"what precedes message {index} with the generation prompt")
        up_to = render(messages[: index + 1], add_generation_prompt=False)
        end_of_turn = last_stop(up_to, len(before), len(up_to), stop_texts)
        if end_of_turn is None:
            raise DataError(_no_end_of_turn(up_to[len(before) :], stop_texts))
        _check_prefix(text, up_to[:end_of_turn], f"the conversation up to message {index}")
        turns.append(TurnSpan(len(before), end_of_turn))
    return turns


def last_stop(text: str, start: int, end: int, stop_texts: Sequence[str]) -> int | None:
    """Character of the stop text that ends text[start:end], trailing whitespace left aside; None without one."""
    body_end = start + len(text[start:end].rstrip())
    at = [body_end - len(stop) for stop in stop_texts if text.endswith(stop, start, body_end)]
    return min(at, default=None)


def turn_mask(tokens: TokenizedText, turns: Sequence[TurnSpan], stop_token_ids: Sequence[int]) -> np.ndarray:
    """bool [T]: True from each turn's first answer token to its end-of-turn token. DataError if a token straddles.

    Token 0 is never marked, as it has no predecessor.
    """
    mask = np.zeros(len(tokens.token_ids), dtype=bool)
    for turn in turns:
        first = token_at(tokens, turn.start)
        last = token_at(tokens, turn.end_of_turn)
        if tokens.token_ids[last] not in stop_token_ids:
            raise DataError(
                f"an assistant turn must end in one of the tokens {list(stop_token_ids)}, "
                f"got token {tokens.token_ids[last]} at character {turn.end_of_turn} of the rendered text; {_CURE}"
            )
        mask[first : last + 1] = True
    mask[:1] = False
    return mask


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


def _check_prefix(text: str, prefix: str, name: str) -> None:
    if text.startswith(prefix):
        return
    at = next((i for i, (a, b) in enumerate(zip(text, prefix, strict=False)) if a != b), min(len(text), len(prefix)))
    raise DataError(
        f"the chat template cannot give exact assistant spans: rendered alone, {name} has {prefix[at : at + 24]!r} "
        f"where the whole conversation has {text[at : at + 24]!r}; {_CURE}"
    )


def _no_end_of_turn(turn: str, stop_texts: Sequence[str]) -> str:
    return (
        f"an assistant turn must end in one of {list(stop_texts)}, the chat template gives {turn[-40:]!r}; add its "
        f"end-of-turn token to eos_token_id in the model's generation_config.json"
    )
