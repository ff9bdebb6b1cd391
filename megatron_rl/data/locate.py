"""Where a rendered conversation was written by the assistant, whichever way the template shows it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_rl.config import DataError
from megatron_rl.data.marks import Extent, Message, Piece, Render, find_pieces
from megatron_rl.data.template import Chat, ChatTemplate
from megatron_rl.data.turns import HeaderTurns, TurnSpan, marked_turns


@dataclass(frozen=True)
class Located:
    """A rendered conversation and its turns."""

    text: str
    """Ends in an end-of-turn token if the last message is the assistant's, even where the template writes none."""
    messages: Sequence[Message]
    turns: list[TurnSpan]
    render: Render
    """Renders other messages with the same tools and effort."""
    header: str = ""
    """The generation prompt; empty where pieces are not known."""
    pieces: Mapping[Piece, Extent] | None = None
    """None where turns could be told without them."""


def locate(template: ChatTemplate, chat: Chat, *, pieces: bool, context: bool) -> Located:
    """Renders a conversation and finds its turns. DataError if the template gives no exact spans.

    pieces: find them even where turns can be told without. context: also those of the other roles, if that is possible.
    """
    render = template.renderer(chat)
    last = chat.messages[-1]
    closing = template.closing(last) if last["role"] == "assistant" else ""
    if not template.has_blocks(chat.tools):
        text = render(chat.messages)
        header = template.generation_prompt(chat)
        found = _pieces(template, chat, text, header=header, context=context)
        turns = HeaderTurns(text + closing, chat.messages, render, header, template.stop_texts).find(found)
        return Located(text + closing, chat.messages, turns, render, header, found)
    text, blocks = template.render_with_blocks(chat)
    assistants = [index for index, message in enumerate(chat.messages) if message["role"] == "assistant"]
    turns = marked_turns(text + closing, blocks, template.stop_texts, assistants)
    if not pieces and not context:
        return Located(text + closing, chat.messages, turns, render)
    header = template.generation_prompt(chat)
    try:
        found = _pieces(template, chat, text, header=header, context=context)
    except DataError:
        if pieces:
            raise
        found = None
    return Located(text + closing, chat.messages, turns, render, header, found)


def _pieces(template: ChatTemplate, chat: Chat, text: str, *, header: str, context: bool) -> dict[Piece, Extent]:
    """Pieces, those of all roles where asked for or where another role's content could be taken for the header."""
    render, margins, prompt = template.renderer(chat), template.margins(chat), header.strip()
    others = [message["content"] for message in chat.messages if message["role"] != "assistant"]
    forged = bool(prompt) and any(prompt in content for content in others)
    if context or forged:
        try:
            return find_pieces(text, chat.messages, render, context=True, margins=margins)
        except DataError:
            if forged:
                raise
    return find_pieces(text, chat.messages, render, margins=margins)
