"""Verbs about SFT data and the checkpoints made of it. Heavy imports happen inside the verb that needs them."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from megatron_rl.cli.options import MAX_SEED, Config, Overrides

data_app = typer.Typer()


@data_app.command()
def label(
    model: Annotated[Path, typer.Argument(help="Hugging Face folder whose tokenizer counts the reasoning.")],
    data: Annotated[list[str], typer.Argument(help="PATH or NAME=PATH; files of one NAME are one dataset.")],
    out: Annotated[Path, typer.Option(help="Folder to write NAME.jsonl into.")],
    difficulty_column: Annotated[str | None, typer.Option(help="Column that says how hard a row is.")] = None,
    grader: Annotated[Path | None, typer.Option(help="YAML file of an endpoint that says how hard a row is.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Seeds the draw.")] = 0,
) -> None:
    """Label rows with the effort of their reasoning, from its length among rows of one dataset and difficulty."""
    from megatron_rl.cli.label import label_files

    label_files(model, data, out, column=difficulty_column, grader=grader, seed=seed)


@data_app.command()
def distill(config: Config, overrides: Overrides = None) -> None:
    """Get reasoning from models behind an endpoint, for prompts or for tool calls without; resumes where it was."""
    from megatron_rl.cli.distill import load_distill, run_distill

    run_distill(load_distill(config, overrides or []))


@data_app.command(name="effort-template")
def show_effort_template(
    model: Annotated[Path, typer.Argument(help="Hugging Face folder with a chat template.")],
    out: Annotated[Path | None, typer.Option(help="File to write; default: print it.")] = None,
) -> None:
    """Extend a model's chat template so that it says the reasoning effort in the system prompt."""
    from megatron_rl.cli.effort_template import effort_template

    extended = effort_template(model, out)
    typer.echo(extended if out is None else out)


@data_app.command()
def soup(
    sources: Annotated[list[Path], typer.Argument(help="Hugging Face folders of one model.")],
    target: Annotated[Path, typer.Argument(help="Folder to write.")],
    weights: Annotated[str | None, typer.Option(help="Shares such as .7,.3; default: equal ones.")] = None,
    normalise: Annotated[bool, typer.Option("--normalise", help="Divide the weights by their sum.")] = False,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="Of the result; default: that of the checkpoints, bfloat16 for FP8 ones."),
    ] = None,
) -> None:
    """Average checkpoints, tensor by tensor; FP8 ones are dequantised first."""
    from megatron_rl.cli.soup import run_soup

    typer.echo(run_soup(sources, target, weights=weights, normalise=normalise, dtype=dtype))


@data_app.command()
def pack(
    data: Annotated[list[Path] | None, typer.Argument(help="Files of conversations, as in data.train.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Required: the trainer packs while it reads.")] = False,
    model: Annotated[
        Path | None, typer.Option(help="Hugging Face folder: its tokenizer counts tokens, its config.json gives costs.")
    ] = None,
    lengths: Annotated[Path | None, typer.Option(help="Instead of DATA: a file with one length per line.")] = None,
    lengths_column: Annotated[str | None, typer.Option(help="Column of DATA that has each row's tokens.")] = None,
    capacity: Annotated[
        int, typer.Option(min=1, max=2**24, help="Tokens of a packed sequence: data.microbatch_tokens.")
    ] = 262144,
    open_bins: Annotated[int, typer.Option(min=1, help="k of Next-k-Fit: data.packing.open_bins.")] = 256,
    buffer: Annotated[int, typer.Option(min=1, help="Sequences that a rank sorts: data.packing.buffer.")] = 256,
    ranks: Annotated[int, typer.Option(min=1, help="Data-parallel ranks to predict for.")] = 64,
    cost: Annotated[
        Literal["attention", "model"] | None, typer.Option(help="data.packing.cost; default: model with --model.")
    ] = None,
    oversized: Annotated[
        Literal["error", "truncate", "drop"], typer.Option(help="Documents longer than a sequence: data.oversized.")
    ] = "error",
    plot: Annotated[Path | None, typer.Option(help="SVG file to write.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Seeds the simulated order.")] = 0,
) -> None:
    """Show what packing would do to data: padding, costs, and the speed-up of cost-sorting for a number of ranks."""
    from megatron_rl.cli.pack import PackInput, cost_model, pack_dry_run
    from megatron_rl.config import ConfigError

    if not dry_run:
        raise ConfigError("pack writes nothing, as the trainer packs while it reads; add --dry-run to see what it does")
    source = PackInput(data or [], model, lengths, lengths_column)
    source.check()
    of_cost, cost_name = cost_model(cost, source)
    from megatron_rl.data.pack_forecast import PackSettings

    settings = PackSettings(capacity, open_bins, buffer, ranks, of_cost, seed)
    pack_dry_run(source, settings, cost_name=cost_name, oversized=oversized, plot=plot)


@data_app.command(name="inspect")
def inspect_conversations(
    model: Annotated[Path, typer.Argument(help="Hugging Face folder with tokenizer and chat template.")],
    data: Annotated[list[str], typer.Argument(help="Files of conversations: .jsonl, .parquet or `datasets` folders.")],
    rows: Annotated[int, typer.Option(min=1, help="Conversations of each file.")] = 3,
    skip: Annotated[int, typer.Option(min=0, help="Rows of each file to leave out before the first.")] = 0,
    train: Annotated[Literal["all", "reasoning", "answer"], typer.Option(help="As data.mask.train.")] = "all",
    wrong_tool_calls: Annotated[
        Literal["mask_turn", "mask_call", "train"], typer.Option(help="As data.mask.wrong_tool_calls.")
    ] = "mask_turn",
    effort: Annotated[
        Literal["none", "low", "medium", "high"] | None, typer.Option(help="In place of what the rows say.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write one offline page instead of printing.")] = None,
) -> None:
    """Show which tokens of conversations are trained, in colour, and why the others are not."""
    from megatron_rl.cli.inspect import Selection, inspect_files
    from megatron_rl.data.mask import MaskConfig

    mask = MaskConfig(train=train, wrong_tool_calls=wrong_tool_calls)
    inspect_files(model, data, Selection(skip, rows, mask, effort), html=html)
