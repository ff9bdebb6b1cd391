"""megatron-rl pack --dry-run: what packing and cost-sorting would do to data, before any GPU is asked."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from megatron_rl.cli.output_folder import check_folder, writing
from megatron_rl.cli.pack_lengths import Document, Documents, documents_of, listed, of_column, rendered
from megatron_rl.cli.pack_plot import plot_svg
from megatron_rl.config import ConfigError
from megatron_rl.data.cost import CostModel
from megatron_rl.data.pack_forecast import AS_PACKED, Forecast, PackSettings, forecast, order_name
from megatron_rl.data.packing import Oversized

CostKind = Literal["attention", "model"]

_QUANTILES = {"least": 0.0, "10%": 0.1, "median": 0.5, "90%": 0.9, "99%": 0.99, "greatest": 1.0}
_NEEDS = {
    "k": "k open sequences",
    "first-fit": "every sequence open",
    "first-fit-decreasing": "every document, sorted",
    "best-fit-decreasing": "every document, sorted",
}
_WORDS = ("packer", "needs", "order of drawing", "")
_BAR_CELLS = 20


@dataclass(frozen=True)
class PackInput:
    """Where lengths come from: conversations and a model's tokenizer, a column of their rows, or a list."""

    data: Sequence[Path]
    model: Path | None
    lengths: Path | None
    column: str | None

    def check(self) -> None:
        """ConfigError unless it names exactly one kind of lengths."""
        if bool(self.data) == (self.lengths is not None):
            got = "both" if self.data else "neither"
            raise ConfigError(f"pack needs either DATA or --lengths, got {got}; give data files, or a list of lengths")
        if self.column is not None and not self.data:
            raise ConfigError("--lengths-column has no effect without DATA; add row files or remove it")
        if self.data and self.column is None and self.model is None:
            raise ConfigError(
                "pack must know how long conversations are: give --model, whose tokenizer and chat template count "
                "their tokens, or --lengths-column"
            )

    def found(self) -> Iterator[Document]:
        """The documents. ConfigError for a tokenizer, DataError for a row that does not fit, when it is reached."""
        if self.lengths is not None:
            return listed(self.lengths)
        if self.column is not None:
            return of_column(self.data, self.column)
        assert self.model is not None, "checked before"
        from megatron_rl.data.render import ChatRenderer, load_tokenizer  # transformers: not for lists of lengths

        return rendered(self.data, ChatRenderer(load_tokenizer(self.model)))


def cost_model(kind: CostKind | None, source: PackInput) -> tuple[CostModel, str]:
    """(cost, what it is in words). None: the model's if there is one. ConfigError for an option without effect."""
    if kind == "attention" or source.model is None:
        if kind == "model":
            raise ConfigError("--cost model needs the model's config.json; add --model or take --cost attention")
        if source.model is not None and (source.lengths is not None or source.column is not None):
            raise ConfigError("--model has no effect when lengths are given and the cost is attention; remove it")
        return (
            CostModel(),
            "attention alone, the sum of squared lengths: the most that sorting can gain; --model adds the rest",
        )
    from megatron_rl.model.folder import read_hf_config  # imports torch

    cost = CostModel.from_hf_config(read_hf_config(source.model))
    even = cost.even_length()
    return cost, f"one forward pass of {source.model}; " + (
        "attention never costs more than the rest"
        if even is None
        else f"attention costs more than the rest from {even:,} tokens on"
    )


def pack_dry_run(
    source: PackInput, settings: PackSettings, *, cost_name: str, oversized: Oversized, plot: Path | None
) -> None:
    """Prints the tables and writes the plot. ConfigError or DataError for the first thing that does not fit."""
    if plot is not None:
        if plot.suffix != ".svg":
            raise ConfigError(f"--plot must be an .svg file, got {plot}; change its name")
        check_folder(plot.parent, "the folder of --plot")
    documents = documents_of(source.found(), capacity=settings.capacity, oversized=oversized)
    console = Console()
    with Console(stderr=True).status(f"packing for {settings.num_ranks} ranks"):
        result = forecast(documents.positions, settings)
    _say(console, _of_documents(documents, settings))
    console.print(_padding_table(result))
    _say(console, f"cost of a packed sequence, over the mean ({cost_name})")
    console.print(_cost_table(result))
    ranks, draws = settings.num_ranks, result.num_draws
    _say(console, f"throughput of {ranks} data-parallel ranks that meet after every sequence, {draws:,} draws each")
    console.print(_throughput_table(result, settings))
    for note in _notes(documents, result, settings, oversized):
        _say(console, f"note: {note}")
    if plot is not None:
        count = f"{len(documents.positions):,} documents in sequences of {settings.capacity:,} tokens"
        with writing(plot.parent):
            plot.write_text(plot_svg(result, f"{count}, {settings.num_ranks} ranks"), encoding="utf-8")
        _say(console, f"plot: {plot}")


def _say(console: Console, text: str) -> None:
    """One line as it is, however narrow the terminal."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _of_documents(documents: Documents, settings: PackSettings) -> str:
    lengths = documents.positions
    total, longest = int(lengths.sum()), int(lengths.max())
    return f"{len(lengths):,} documents, {total:,} tokens, the longest {longest:,}; sequences of {settings.capacity:,}"


def _padding_table(result: Forecast) -> Table:
    table = _table("packer", "sequences", "padding", "needs")
    for name, (count, share) in result.padding.items():
        needs = _NEEDS["k" if "k =" in name else name]
        table.add_row(name, f"{count:,}", f"{share:.3%}", needs)
    return table


def _cost_table(result: Forecast) -> Table:
    table = _table(*_QUANTILES)
    table.add_row(*(f"{value:.3g}" for value in np.quantile(result.costs, list(_QUANTILES.values()))))
    return table


def _throughput_table(result: Forecast, settings: PackSettings) -> Table:
    table = _table("order of drawing", "of the ideal", "speed-up", "")
    for order, share in result.throughput.items():
        bar = "█" * round(share * _BAR_CELLS)
        style = "bold" if order == order_name(settings.buffer) else ""
        table.add_row(order, f"{share:.1%}", f"{result.speed_up(order):.2f}x", bar, style=style)
    table.add_row("all ranks equal", "100.0%", f"{1 / result.throughput[AS_PACKED]:.2f}x", "█" * _BAR_CELLS)
    return table


def _notes(documents: Documents, result: Forecast, settings: PackSettings, oversized: Oversized) -> list[str]:
    notes = []
    if documents.num_oversized:
        what = "cut at the capacity" if oversized == "truncate" else "left out"
        notes.append(f"{documents.num_oversized:,} documents that are longer than a sequence were {what}")
    sequences, share = result.padding[f"Next-k-Fit, k = {settings.open_bins}"]
    if share * sequences * 10 > 1 and sequences < 10 * settings.open_bins:
        notes.append(
            f"one pass gives only {sequences:,} sequences, so the ones still open at its end make up most of the "
            "padding; a trainer's passes have no end"
        )
    return notes


def _table(*columns: str) -> Table:
    """Numbers to the right, words to the left."""
    table = Table(box=SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, justify="left" if column in _WORDS else "right")
    return table
