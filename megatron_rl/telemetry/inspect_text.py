"""Conversations in the terminal: trained tokens in colour, masked ones dim, and a line per span with its reason."""

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_rl.telemetry.inspect_view import ShownConversation, ShownSpan, share, totals, visible

STYLES = {
    "reasoning": "bold cyan",
    "answer": "bold green",
    "tool_call": "bold yellow",
    "end_of_turn": "bold magenta",
    "turn": "bold green",
}
_MASKED, _ERROR = "dim", "bold red"


def print_conversation(console: Console, conversation: ShownConversation) -> None:
    """Source and counts, the text as the model reads it, then its spans. Without colours trained text is in «»."""
    console.rule(style=_MASKED)
    console.print(Text(conversation.source, style="bold"), soft_wrap=True)
    if conversation.error:
        console.print(Text(conversation.error, style=_ERROR), soft_wrap=True)
        return
    console.print(Text(conversation.summary + "\n"), soft_wrap=True)
    marks = console.color_system is None
    text = Text()
    for span in conversation.spans:
        text.append(_span_text(span, marks=marks), style=STYLES[span.kind] if span.trained else _MASKED)
    console.print(text, soft_wrap=True)
    for name in conversation.not_rendered:
        console.print(Text(f"not rendered by the chat template: {name}", style=_ERROR), soft_wrap=True)
    console.print(_span_table(conversation.spans))


def print_totals(console: Console, conversations: Sequence[ShownConversation]) -> None:
    """Tokens by kind over all conversations, and how many rows have no trained token or were refused."""
    console.rule(style=_MASKED)
    console.print(Text(counts_line(conversations)), soft_wrap=True)
    table = Table(box=SIMPLE_HEAD)
    table.add_column("kind")
    for name in ("trained", "masked", "share trained"):
        table.add_column(name, justify="right")
    for total in totals(conversations):
        row = f"{total.trained:,}", f"{total.masked:,}", share(total.trained, total.trained + total.masked)
        table.add_row(total.kind.replace("_", " "), *row)
    console.print(table)


def counts_line(conversations: Sequence[ShownConversation]) -> str:
    """What was looked at, in one line."""
    refused = sum(bool(conversation.error) for conversation in conversations)
    untrained = sum(not conversation.num_trained for conversation in conversations) - refused
    line = f"{len(conversations):,} conversation{'s' if len(conversations) != 1 else ''}"
    line += f", {untrained:,} of them without a trained token" if untrained else ""
    return line + (f", {refused:,} refused" if refused else "")


def _span_text(span: ShownSpan, *, marks: bool) -> str:
    text = visible("".join(token.text for token in span.tokens))
    return f"«{text}»" if marks and span.trained else text


def _span_table(spans: Sequence[ShownSpan]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(justify="right", style=_MASKED)
    table.add_column(justify="right", style=_MASKED)
    table.add_column()
    table.add_column(overflow="fold")
    for span in spans:
        style = STYLES[span.kind] if span.trained else _MASKED
        what = "trained" if span.trained else "masked"
        tokens = f"{span.num_tokens:,} token{'s' if span.num_tokens > 1 else ''}"
        kind = f"{span.kind.replace('_', ' ')}, {what}" if span.kind != "context" else "context"
        table.add_row(f"from {span.start:,}", tokens, Text(kind, style=style), Text(visible(span.reason), style=style))
    return table
