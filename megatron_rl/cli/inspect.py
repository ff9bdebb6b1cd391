"""megatron-rl inspect: what of a file's conversations a model is trained on, and why not the rest."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from rich.console import Console

from megatron_rl.cli.output_folder import check_folder, writing
from megatron_rl.config import ConfigError, DataError
from megatron_rl.data.conversation import Conversation, conversation_of
from megatron_rl.data.mask import MaskConfig
from megatron_rl.data.render import ChatRenderer, Rendered, load_tokenizer
from megatron_rl.data.rows import Rows, open_rows
from megatron_rl.telemetry.inspect_page import inspect_page
from megatron_rl.telemetry.inspect_text import print_conversation, print_totals
from megatron_rl.telemetry.inspect_view import ShownConversation, ShownSpan, ShownToken


@dataclass(frozen=True)
class Selection:
    """Which rows to look at, and how."""

    skip: int
    """Rows of each file to leave out from its start."""
    rows: int
    """Rows of each file to show."""
    mask: MaskConfig
    effort: str | None
    """Told to the template in place of what the rows say."""


def inspect_files(model: Path, data: Sequence[str], selection: Selection, *, html: Path | None = None) -> None:
    """Prints the selected rows of each file, or writes them to html, and prints totals.

    A row that cannot be read or rendered is shown with its reason. ConfigError, DataError: no such model, file or row.
    """
    if html is not None:
        if html.is_dir():
            raise ConfigError(f"--html must be an HTML file, got the folder {html}; add a file name")
        check_folder(html.parent, "the folder of --html")
    files = [open_rows(path) for path in data]
    for rows in files:
        if selection.skip >= len(rows):
            raise DataError(
                f"--skip must leave rows of {rows.path}, which has {len(rows)}, got {selection.skip}; skip fewer"
            )
    renderer = ChatRenderer(load_tokenizer(model, option="MODEL"))
    console = Console(highlight=False)
    shown = []
    for rows in files:
        for conversation in _shown_rows(rows, renderer, selection):
            shown.append(conversation)
            if html is None:
                print_conversation(console, conversation)
    if html is not None:
        page = inspect_page(shown, title=", ".join(data), settings=_settings(model, data, selection))
        with writing(html.parent):
            html.write_text(page, encoding="utf-8")
    print_totals(console, shown)
    if html is not None:
        console.print(str(html), soft_wrap=True, markup=False)


def _shown_rows(rows: Rows, renderer: ChatRenderer, selection: Selection) -> Iterator[ShownConversation]:
    for index in islice(range(selection.skip, len(rows)), selection.rows):
        source = rows.source(index)
        try:
            conversation = conversation_of(source, rows.row(index))
            if selection.effort is not None:
                conversation = replace(conversation, effort=selection.effort)
            yield _shown(conversation, renderer.render(conversation, selection.mask, parts=True))
        except DataError as error:
            yield ShownConversation(source, error=str(error).removeprefix(f"{source}: "))


def _shown(conversation: Conversation, rendered: Rendered) -> ShownConversation:
    spans = tuple(
        ShownSpan(span.start, span.kind, span.trained, span.reason, tuple(_tokens(rendered, span.start, span.end)))
        for span in rendered.spans
    )
    return ShownConversation(conversation.source, spans, rendered.effort, rendered.not_rendered)


def _tokens(rendered: Rendered, start: int, end: int) -> Iterator[ShownToken]:
    """Tokens start to end by the characters they stand for; those that share a character together."""
    tokens = rendered.tokens
    starts, ends = tokens.starts.tolist(), tokens.ends.tolist()
    first = start
    while first < end:
        last, reached = first + 1, ends[first]
        while last < end and starts[last] < reached:
            last, reached = last + 1, max(reached, ends[last])
        yield ShownToken(tuple(tokens.token_ids[first:last].tolist()), tokens.text[starts[first] : reached])
        first = last


def _settings(model: Path, data: Sequence[str], selection: Selection) -> list[tuple[str, str]]:
    mask = f"train {selection.mask.train}, wrong tool calls {selection.mask.wrong_tool_calls}"
    effort = [("effort", selection.effort)] if selection.effort else []
    return [("model", str(model)), ("data", ", ".join(data)), ("mask", mask), *effort]
