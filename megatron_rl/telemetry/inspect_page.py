"""Conversations as one HTML page: opens from disk, asks for nothing on the network, runs no script.

Its Content-Security-Policy allows exactly its own style, by hash, and every text is escaped: nothing that a row holds
can run or load anything.
"""

import base64
import hashlib
from collections.abc import Iterator, Sequence
from importlib import resources

from jinja2 import Environment, StrictUndefined

from megatron_rl.telemetry.inspect_text import counts_line
from megatron_rl.telemetry.inspect_view import ShownConversation, ShownSpan, ShownToken, share, totals, visible


def inspect_page(conversations: Sequence[ShownConversation], *, title: str, settings: Sequence[tuple[str, str]]) -> str:
    """HTML with totals, and every token of every conversation. settings: what to say above them, (name, value)."""
    style = _asset("page.css") + _asset("inspect.css")
    environment = Environment(autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True)
    environment.globals.update(share=share, visible=visible, placed=_placed)
    return environment.from_string(_asset("inspect.jinja")).render(
        title=title,
        settings=settings,
        style=style,
        style_hash="sha256-" + base64.b64encode(hashlib.sha256(style.encode()).digest()).decode(),
        counts=counts_line(conversations),
        totals=totals(conversations),
        conversations=conversations,
    )


def _placed(span: ShownSpan) -> Iterator[tuple[str, ShownToken]]:
    """(what to say of a token, token)"""
    at = span.start
    for token in span.tokens:
        numbers = ", ".join(map(str, token.ids))
        many = len(token.ids) > 1
        yield (f"tokens {at} to {at + len(token.ids) - 1}: {numbers}" if many else f"token {at}: {numbers}"), token
        at += len(token.ids)


def _asset(name: str) -> str:
    return (resources.files("megatron_rl.telemetry") / "page" / name).read_text(encoding="utf-8")
