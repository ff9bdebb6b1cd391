"""Chat templates: what they make of messages, and what they write around an assistant's turn."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeVar

from transformers.utils.chat_template_utils import render_jinja_template

from megatron_rl.config import ConfigError, DataError
from megatron_rl.data.effort_template import EFFORT_VARIABLE, uses_effort
from megatron_rl.data.marks import MARGINS, Message, Render, common_prefix, find_pieces

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Tools = Sequence[dict[str, Any]]
_T = TypeVar("_T")

ANSWER, REPLY = "probeanswer", "probereply"
"""Contents of the made-up conversations that show what a template writes between two turns."""
OPENING: list[Message] = [{"role": "user", "content": "probe"}, {"role": "assistant", "content": ANSWER}]

_RENDERING = Lock()
"""transformers keeps the blocks of the text it renders in a place that all threads share."""
_GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Chat:
    """A conversation in the form templates expect, and what a template is told besides."""

    messages: Sequence[Message]
    tools: Tools = ()
    effort: str | None = None


class ChatTemplate:
    """The chat template of one tokenizer; some tokenizers have another one for conversations with tools."""

    def __init__(self, tokenizer: "PreTrainedTokenizerFast", stop_texts: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self.stop_texts = tuple(stop_texts)
        """Texts of the tokens that end an assistant turn."""
        self._special_tokens = tokenizer.special_tokens_map
        self._known: dict[tuple[Any, ...], Any] = {}
        """What was found out about the template once: (question, what the answer depends on) -> answer."""

    def has_blocks(self, tools: Tools) -> bool:
        """Whether the template itself marks what the assistant writes, with {% generation %}."""
        return self._once(("blocks", bool(tools)), lambda: bool(_GENERATION_BLOCK.search(self._source(tools))))

    def render(self, chat: Chat, *, prompt: bool = False) -> str:
        """Text of a conversation; prompt: and of the start of an assistant turn. DataError if the template refuses."""
        return self.render_with_blocks(chat, prompt=prompt)[0]

    def render_with_blocks(self, chat: Chat, *, prompt: bool = False) -> tuple[str, list[tuple[int, int]]]:
        """(text, character spans of the template's generation blocks)."""
        options: dict[str, Any] = {
            **self._special_tokens,
            "tools": list(chat.tools) or None,
            "chat_template": self._source(chat.tools),
            "return_assistant_tokens_mask": self.has_blocks(chat.tools),
            "add_generation_prompt": prompt,
        }
        if chat.effort is not None:
            options[EFFORT_VARIABLE] = chat.effort
        rendered: Any
        try:
            with _RENDERING:
                rendered = render_jinja_template([list(chat.messages)], **options)
        except Exception as error:  # a template is a program: it may raise anything
            raise DataError(f"the chat template refuses the conversation: {error}; mend the messages") from error
        texts, blocks = rendered
        return texts[0], blocks[0] if blocks else []

    def renderer(self, chat: Chat) -> Render:
        """Renders other messages with the tools and the effort of a chat."""
        return lambda messages: self.render(replace(chat, messages=messages))

    def generation_prompt(self, chat: Chat) -> str:
        """What a prompt ends in that asks for the assistant's turn: the turn's text in a conversation starts behind it.

        The first characters may be missing where a template ends a conversation without prompt by similar ones.
        """

        def find() -> str:
            asked = replace(chat, messages=OPENING[:1])
            prompt = self.render(asked, prompt=True)
            return prompt[common_prefix(prompt, self.render(asked)) :]

        return self._once(("prompt", bool(chat.tools), chat.effort), find)

    def margins(self, chat: Chat) -> tuple[str | None, ...]:
        """MARGINS, first of all the one that fits what the template strips off."""
        spaced = {"content": f"\n {ANSWER} \n", "reasoning_content": f"\n {REPLY} \n"}
        probe = replace(chat, messages=[OPENING[0], {**OPENING[1], **spaced}], effort=None)

        def fits(margin: str | None) -> bool:
            try:
                find_pieces(self.render(probe), probe.messages, self.renderer(probe), margins=[margin])
            except DataError:
                return False
            return True

        return self._once(
            ("margins", bool(chat.tools)), lambda: tuple(sorted(MARGINS, key=lambda margin: not fits(margin)))
        )

    def closing(self, message: Message) -> str:
        """What ends a conversation whose last message is this one of the assistant, if the template does not end it.

        Some templates end a turn only by the first token of the next message. (GLM-4.5: <|user|>, <|observation|>)
        """
        role = "tool" if message.get("tool_calls") else "user"
        return self._once(("closing", role), lambda: self._find_closing(role))

    def behind_answer(self, messages: Sequence[Message], *, tools: Tools = (), prompt: bool = False) -> tuple[str, str]:
        """(text, what follows the first ANSWER in it; nothing if the template leaves that out)."""
        text = self.render(Chat(messages, tools), prompt=prompt)
        return text, text.partition(ANSWER)[2]

    def end_of_turn(self, text: str) -> str:
        """The whitespace and the stop text with which a text begins; nothing if it does not."""
        body = text.lstrip()
        stops = [stop for stop in self.stop_texts if body.startswith(stop)]
        return text[: len(text) - len(body)] + max(stops, key=len) if stops else ""

    def check_effort(self, chat: Chat) -> None:
        """DataError if the chat has an effort and the template ignores it."""
        if chat.effort is None:
            return
        if not self._once(("effort", bool(chat.tools)), lambda: uses_effort(self._source(chat.tools))):
            raise DataError(
                f"effort must reach the model, but the chat template ignores {EFFORT_VARIABLE} = {chat.effort}; "
                "extend the template with megatron-rl effort-template"
            )

    def check_reasoning(self, chat: Chat) -> None:
        """ConfigError if the template leaves out reasoning even in the last turn of a conversation."""
        thinking = [OPENING[0], {**OPENING[1], "reasoning_content": REPLY}]
        probe = replace(chat, messages=thinking, effort=None)
        if not self._once(("reasoning", bool(chat.tools)), lambda: REPLY in self.render(probe)):
            raise ConfigError(
                "mask.train reasoning needs a chat template that renders reasoning_content, but this model's leaves it "
                "out; choose all or answer, or extend the template"
            )

    def _find_closing(self, role: str) -> str:
        if self.end_of_turn(self.behind_answer(OPENING)[1]):
            return ""
        try:
            closing = self.end_of_turn(self.behind_answer([*OPENING, {"role": role, "content": REPLY}])[1])
        except DataError:
            closing = ""
        return closing if closing or role == "user" else self._find_closing("user")

    def _source(self, tools: Tools) -> str:
        return self._once(("source", bool(tools)), lambda: self._tokenizer.get_chat_template(tools=list(tools) or None))

    def _once(self, key: tuple[Any, ...], find: Callable[[], _T]) -> _T:
        if key not in self._known:
            self._known[key] = find()
        return self._known[key]


def plain(messages: Sequence[Message]) -> list[Message]:
    """Copies in the form templates expect: content is text, tool calls have objects as arguments or are missing."""
    return [_plain_message(message) for message in messages]


def _plain_message(message: Message) -> Message:
    plain = {**message, "content": message.get("content") or ""}
    calls = plain.pop("tool_calls", None)
    return {**plain, "tool_calls": [_plain_call(call) for call in calls]} if calls else plain


def _plain_call(call: dict[str, Any]) -> dict[str, Any]:
    if "function" in call:
        return {**call, "function": _plain_call(call["function"])}
    arguments = call.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        raise DataError(
            f"arguments of a tool call must be an object or its JSON text, got {call.get('arguments')!r:.80}; "
            "mend the call"
        )
    return {**call, "arguments": arguments}
