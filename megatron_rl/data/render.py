"""Messages to token ids and back, with the model's own tokenizer and chat template."""

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import Tokenizer

from megatron_rl.config import ConfigError, DataError
from megatron_rl.data.conversation import Conversation
from megatron_rl.data.locate import Located, locate
from megatron_rl.data.marks import Message
from megatron_rl.data.mask import Fates, MaskConfig
from megatron_rl.data.parts import PartFinder
from megatron_rl.data.spans import Rendered, TokenSpan, context_borders, cover, loss_mask, turn_spans
from megatron_rl.data.template import OPENING, REPLY, Chat, ChatTemplate, Tools, plain
from megatron_rl.data.tokenizer import has_tokenizer, load_tokenizer, stop_token_ids
from megatron_rl.data.turns import TokenizedText, token_at
from megatron_rl.data.wrong_calls import find_wrong_calls

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["ChatRenderer", "MaskConfig", "Rendered", "TokenSpan", "has_tokenizer", "load_tokenizer"]

_ALL, _EVERY_CALL = MaskConfig(), MaskConfig(wrong_tool_calls="train")


class ChatRenderer:
    """Renders conversations, tells which tokens are the assistant's, and continues sampled ones without re-rendering.

    Raises ConfigError when the tokenizer's template cannot be continued after an assistant turn that ended.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerFast") -> None:
        self._tokenizer = tokenizer
        self._encoder = _exact_encoder(tokenizer)
        self.stop_token_ids: tuple[int, ...] = stop_token_ids(tokenizer)
        """Tokens that end an assistant turn: eos_token_id of generation_config.json and the tokenizer's own."""
        pad_id: Any = tokenizer.pad_token_id
        self.pad_id: int = self.stop_token_ids[0] if pad_id is None else pad_id
        """What fills padding positions."""
        self._template = ChatTemplate(tokenizer, [self.decode([token]) for token in self.stop_token_ids])
        if fault := self._continuation_fault("user"):
            raise ConfigError(f"{tokenizer.name_or_path}: {fault}")
        self._tool_fault = self._continuation_fault("tool")

    def prompt_ids(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        """The conversation so far and the start of an assistant turn."""
        return self._encode(self._template.render(Chat(plain(messages), tools), prompt=True)).token_ids.tolist()

    def continuation_ids(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        """What follows a sampled turn that ended in its end-of-turn token: these messages and the next turn's start.

        Rendered after a made-up turn and cut behind that turn's end-of-turn token, so it holds after any turn.
        ConfigError if the template has no tool messages and one is given.
        """
        if self._tool_fault and any(message["role"] == "tool" for message in messages):
            raise ConfigError(self._tool_fault)
        return self._continue(OPENING, messages, tools)

    def conversation(self, messages: Sequence[Message], tools: Tools = ()) -> tuple[np.ndarray, np.ndarray]:
        """(token_ids int32 [T], loss_mask bool [T]): True on each assistant turn, its end-of-turn token included.

        DataError if the template refuses the conversation or gives no exact token spans for its turns.
        """
        rendered = self._rendered(Chat(plain(messages), tools), _EVERY_CALL, parts=False)
        return rendered.token_ids, rendered.loss_mask

    def render(self, conversation: Conversation, mask: MaskConfig = _ALL, *, parts: bool = False) -> Rendered:
        """Tokens of a row, which of them are trained, and why.

        parts: split turns into reasoning, answer and tool calls, and the context by message, wherever that is possible
        and not only where the mask needs it. DataError, with the row's source in front, if the template refuses the
        conversation, gives no exact spans or ignores its effort.
        """
        try:
            chat = Chat(plain(conversation.messages), conversation.tools, conversation.effort)
            return self._rendered(chat, mask, parts=parts)
        except DataError as error:
            raise DataError(f"{conversation.source}: {error}") from error

    def decode(self, ids: Sequence[int]) -> str:
        """Text of tokens, special ones included."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _rendered(self, chat: Chat, mask: MaskConfig, *, parts: bool) -> Rendered:
        self._template.check_effort(chat)
        if mask.train == "reasoning":
            self._template.check_reasoning(chat)
        wrong = [] if mask.wrong_tool_calls == "train" else find_wrong_calls(chat.messages, chat.tools)
        fates = Fates(mask, wrong)
        located = locate(self._template, chat, pieces=fates.need_parts, context=parts)
        tokens = self._encode(located.text)
        spans = self._spans(tokens, located, fates, parts=parts)
        return Rendered(tokens, loss_mask(spans), spans, chat.effort, _not_rendered(located))

    def _spans(self, tokens: TokenizedText, located: Located, fates: Fates, *, parts: bool) -> list[TokenSpan]:
        """Of the whole conversation; turns in one piece unless the mask needs parts or they are asked for and found."""
        of_turns: list[list[TokenSpan]] | None = None
        borders: list[tuple[int, str]] | None = None
        turns, pieces, stops = located.turns, located.pieces, self.stop_token_ids
        if pieces is not None and (parts or fates.need_parts):
            finder = PartFinder(located.text, located.messages, located.render, located.header, pieces)
            try:
                of_turns = turn_spans(tokens, turns, stops, fate=fates, parts=finder.find(turns))
            except DataError:
                if fates.need_parts:
                    raise
        if pieces is not None and parts:
            borders = context_borders(located, self._template.stop_texts)
        of_turns = of_turns or turn_spans(tokens, turns, stops, fate=fates, parts=None)
        return cover(tokens, of_turns, borders)

    def _encode(self, text: str) -> TokenizedText:
        try:
            encoding = self._encoder.encode(text, add_special_tokens=False)
        except TypeError:
            raise DataError("a conversation must be Unicode text, got half of a surrogate pair; mend it") from None
        ids, borders = encoding.ids, encoding.offsets
        offsets = np.fromiter(chain.from_iterable(borders), np.int32, count=2 * len(ids)).reshape(-1, 2)
        return TokenizedText(text, np.array(ids, dtype=np.int32), offsets[:, 0], offsets[:, 1])

    def _continue(self, opening: Sequence[Message], messages: Sequence[Message], tools: Tools) -> list[int]:
        """Token ids behind the end-of-turn token of the opening's last message, whose content is ANSWER."""
        text, rest = self._template.behind_answer([*opening, *plain(messages)], tools=tools, prompt=True)
        rest = rest.lstrip()
        if not self._template.end_of_turn(rest):
            raise DataError(
                f"the chat template must end an assistant turn with one of {list(self._template.stop_texts)}, "
                f"got {rest[:24]!r}; add its end-of-turn token to eos_token_id in the model's generation_config.json"
            )
        tokens = self._encode(text)
        return tokens.token_ids[token_at(tokens, len(text) - len(rest)) + 1 :].tolist()

    def _continuation_fault(self, role: str) -> str:
        """Why a message of this role cannot follow a sampled turn, or nothing."""
        reply = [{"role": role, "content": REPLY}]
        longer = [{"role": "user", "content": "another"}, {"role": "assistant", "content": "one"}, *OPENING]
        try:
            ids = self._continue(OPENING, reply, ())
            same = ids == self._continue(longer, reply, ())
        except DataError as error:
            return f"a {role} message must be able to follow a sampled turn: {error}"
        if REPLY not in self.decode(ids):
            return f"the chat template must render {role} messages, got {self.decode(ids)!r} for {reply}; mend it"
        if not same:
            return f"the chat template must render a {role} message alike after any conversation; mend it"
        return ""


def _exact_encoder(tokenizer: "PreTrainedTokenizerFast") -> Tokenizer:
    """A copy of the fast tokenizer with offsets of every character: post-processors may trim whitespace off them."""
    encoder = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    encoder.post_processor = None
    encoder.no_truncation()
    encoder.no_padding()
    return encoder


def _not_rendered(located: Located) -> tuple[str, ...]:
    """Texts of the assistant that have no place in the rendered text, where their places are known."""
    missing = []
    for index, message in enumerate(located.messages if located.pieces is not None else ()):
        if message["role"] != "assistant":
            continue
        there = {piece.kind for piece in located.pieces or () if piece.message == index}
        content, reasoning = message["content"], message.get("reasoning_content")
        if isinstance(reasoning, str):
            if reasoning.strip() and "reasoning" not in there:
                missing.append(f"messages[{index}].reasoning_content")
        elif "</think>" in content and "reasoning" not in there:
            missing.append(f"messages[{index}].content up to </think>")
        if content.strip() and not there & {"content", "reasoning"}:
            missing.append(f"messages[{index}].content")
        if message.get("tool_calls") and "call" not in there:
            missing.append(f"messages[{index}].tool_calls")
    return tuple(missing)
