"""The megatron-rl command: one function per verb. Heavy imports happen inside the verb that needs them."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from megatron_rl.cli.data_verbs import data_app
from megatron_rl.cli.mergemix import mergemix_app
from megatron_rl.cli.options import MAX_SEED, Config, Overrides

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="SFT and RL of Mixture-of-Experts language models with Megatron-Core and vLLM.",
)

app.add_typer(data_app)
app.add_typer(mergemix_app, name="mergemix")

DryRun = Annotated[bool, typer.Option("--dry-run", help="Check and count everything for its cluster; start nothing.")]
GpuMemory = Annotated[
    float | None, typer.Option(min=1, help="GiB of one GPU: a dry run fails if a rank would not fit.")
]
GpusPerNode = Annotated[int, typer.Option(min=1, help="GPUs of one node, for a dry run.")]
_NODE_GPUS = 8


@app.command()
def sft(
    config: Config,
    overrides: Overrides = None,
    dry_run: DryRun = False,
    gpu_memory: GpuMemory = None,
    gpus_per_node: GpusPerNode = _NODE_GPUS,
) -> None:
    """Fine-tune on conversations; resumes if the run folder has a checkpoint."""
    from megatron_rl.cli.runs import SftRun
    from megatron_rl.config.load import load_config

    run = load_config(config, SftRun, overrides or [])
    _check_dry_run_options(dry_run, gpu_memory, gpus_per_node)
    if dry_run:
        from megatron_rl.cli.dry_run import Cluster, dry_run_sft

        typer.echo(dry_run_sft(run, Cluster(gpus_per_node, gpu_memory)))
        return
    from megatron_rl.cli.launch import run_sft

    folder = run_sft(run)
    _say_done(folder, run.trainer.export)


@app.command()
def rl(
    config: Config,
    overrides: Overrides = None,
    dry_run: DryRun = False,
    gpu_memory: GpuMemory = None,
    gpus_per_node: GpusPerNode = _NODE_GPUS,
) -> None:
    """Train by RL against engines that this command starts; resumes if the run folder has a checkpoint."""
    from megatron_rl.cli.runs import RlRun
    from megatron_rl.config.load import load_config

    run = load_config(config, RlRun, overrides or [])
    _check_dry_run_options(dry_run, gpu_memory, gpus_per_node)
    if dry_run:
        from megatron_rl.cli.dry_run import Cluster, dry_run_rl

        typer.echo(dry_run_rl(run, Cluster(gpus_per_node, gpu_memory)))
        return
    from megatron_rl.cli.launch import run_rl

    folder = run_rl(run)
    _say_done(folder, run.trainer.export)


@app.command()
def engine(
    config: Config,
    overrides: Overrides = None,
    index: Annotated[int, typer.Option(min=0, help="Which of engine.urls, counted from 0.")] = 0,
) -> None:
    """Serve one engine of an RL run that is spread over machines, until it is ended."""
    from megatron_rl.cli.runs import RlRun
    from megatron_rl.cli.serve_engine import serve_engine
    from megatron_rl.config.load import load_config

    serve_engine(load_config(config, RlRun, overrides or []), index)


@app.command()
def orchestrator(config: Config, overrides: Overrides = None) -> None:
    """Serve prompts and batches of an RL run that is spread over machines, until its trainer has finished."""
    from megatron_rl.cli.orchestrate import serve
    from megatron_rl.cli.runs import RlRun
    from megatron_rl.config.load import load_config

    serve(load_config(config, RlRun, overrides or []))


@app.command(name="eval")
def evaluate(
    config: Config,
    out: Annotated[Path, typer.Option(help="Folder for eval.json and logs.")],
    overrides: Overrides = None,
) -> None:
    """Measure pass rates of an RL config's model on its held-out splits; choose the model with model.path=..."""
    from megatron_rl.cli.launch import run_evaluation
    from megatron_rl.cli.runs import RlRun
    from megatron_rl.config.load import load_config

    typer.echo(run_evaluation(load_config(config, RlRun, overrides or []), out).read_text(encoding="utf-8"))


@app.command(name="config")
def show_config(config: Config, overrides: Overrides = None) -> None:
    """Print a run's config with every default and override resolved."""
    from megatron_rl.cli.runs import load_run
    from megatron_rl.config.load import dump_config

    typer.echo(dump_config(load_run(config, overrides or [])))


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, in the order to show them.")],
    out: Annotated[Path | None, typer.Option(help="HTML file; default: report.html in the last folder.")] = None,
) -> None:
    """Write one offline page with curves and readable rollouts."""
    from megatron_rl.cli.output_folder import check_folder
    from megatron_rl.config import ConfigError
    from megatron_rl.telemetry.report import build_report

    if out is not None:
        if out.is_dir():
            raise ConfigError(f"--out must be an HTML file, got the folder {out}; add a file name")
        check_folder(out.parent, "the folder of --out")
    typer.echo(build_report(runs, out or runs[-1] / "report.html"))


@app.command()
def snr(run: Annotated[Path, typer.Argument(help="Folder of an RL run with trainer.snr.")]) -> None:
    """Print how much of the importance ratio is policy movement and how much is engine noise, and what follows."""
    from megatron_rl.cli.snr import snr_report

    typer.echo(snr_report(run))


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(help="Hugging Face folder, or a checkpoint folder of a run.")],
    target: Annotated[Path, typer.Argument(help="Folder to write.")],
    hf_source: Annotated[
        Path | None,
        typer.Option(
            help="Folder whose tokenizer, chat template and generation config go into a Hugging Face folder; default: "
            "SOURCE, but a run's checkpoint holds none. config.json is the checkpoint's own."
        ),
    ] = None,
    platform: Annotated[
        Literal["cpu", "cuda"] | None,
        typer.Option(
            help="That of the runs which write or read the checkpoint; default: as recorded in SOURCE, or cpu."
        ),
    ] = None,
) -> None:
    """Convert Hugging Face weights to a Megatron checkpoint, or a checkpoint back, tensor by tensor."""
    from megatron_rl.cli.output_folder import check_folder

    check_folder(target.parent, "the folder of TARGET")
    from megatron_rl.checkpoint.conversion import tokenizer_note
    from megatron_rl.checkpoint.convert import convert as convert_checkpoint

    typer.echo(convert_checkpoint(source, target, hf_source=hf_source, platform_kind=platform))
    if note := tokenizer_note(target):
        typer.echo(f"note: {note}", err=True)


@app.command(name="make-tiny")
def make_tiny_model(
    folder: Annotated[Path, typer.Argument(help="Folder to write model and data into.")],
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Seeds weights and data.")] = 0,
    family: Annotated[Literal["qwen3_moe", "glm4_moe"], typer.Option(help="Architecture.")] = "qwen3_moe",
) -> None:
    """Write a tiny random MoE with its tokenizer, and SFT data of the baker task."""
    from megatron_rl.cli.output_folder import check_folder
    from megatron_rl.cli.tiny import make_tiny

    check_folder(folder, "FOLDER")
    typer.echo(make_tiny(folder, seed=seed, family=family).model)


@app.command()
def quickstart(
    folder: Annotated[Path, typer.Option(help="Folder for everything the quickstart writes.")] = Path(
        "runs/quickstart"
    ),
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Seeds weights, data and sampling.")] = 0,
) -> None:
    """Tiny model, SFT, RL against a real vLLM, a table and a page. Resumes where it was stopped."""
    from megatron_rl.cli.output_folder import check_folder
    from megatron_rl.cli.quickstart import run_quickstart

    check_folder(folder, "--folder")
    run_quickstart(folder, seed=seed)


def _check_dry_run_options(dry_run: bool, gpu_memory: float | None, gpus_per_node: int) -> None:
    from megatron_rl.config import ConfigError

    for option, given in (("--gpu-memory", gpu_memory is not None), ("--gpus-per-node", gpus_per_node != _NODE_GPUS)):
        if given and not dry_run:
            raise ConfigError(f"{option} has no effect without --dry-run; add that or remove this")


def _say_done(folder: Path, exported: bool) -> None:
    from megatron_rl.checkpoint.folders import latest_checkpoint

    weights = folder / "hf" if exported else latest_checkpoint(folder / "checkpoints")
    typer.echo(f"done: weights in {weights}, page {folder / 'report.html'}")


def main() -> None:
    """Entry point of the console script: user errors in one line, the rest with a traceback."""
    import sys

    from megatron_rl.cli.supervisor import RunFailed, RunStopped
    from megatron_rl.cli.user_errors import run_with_user_errors

    try:
        sys.exit(run_with_user_errors(app))
    except RunStopped as stop:
        print(stop.message, file=sys.stderr, flush=True)
        raise
    except RunFailed as failure:
        print(f"error: {failure}", file=sys.stderr, flush=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
