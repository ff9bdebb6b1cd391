"""megatron-rl mergemix: candidates of a plan as checkpoints, then their ranking by scores."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

mergemix_app = typer.Typer(
    no_args_is_help=True, help="Judge data mixtures by merging specialists, before training on any mixture."
)

Plan = Annotated[Path, typer.Argument(help="YAML file: dir, base, specialists, grid or candidates.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="key=value, such as grid=4.")]


@mergemix_app.command()
def build(
    plan: Plan,
    overrides: Overrides = None,
    only: Annotated[str | None, typer.Option(help="One candidate; default: all that are not there yet.")] = None,
) -> None:
    """Write the candidates, a Hugging Face folder each; prints their paths, to be evaluated by megatron-rl eval."""
    from megatron_rl.checkpoint.mergemix import MergeMixConfig, cluster_warning
    from megatron_rl.checkpoint.mergemix import build as build_candidates
    from megatron_rl.cli.output_folder import check_folder
    from megatron_rl.cli.soup import write_progress
    from megatron_rl.config.load import load_config

    config = load_config(plan, MergeMixConfig, overrides or [])
    check_folder(Path(config.dir), "dir")
    if warning := cluster_warning(config):
        typer.echo(f"warning: {warning}", err=True)
    with write_progress() as show:
        paths = build_candidates(config, only=only, on_written=show)
    for path in paths:
        typer.echo(path)


@mergemix_app.command()
def rank(
    plan: Plan,
    overrides: Overrides = None,
    merged: Annotated[
        Path | None,
        typer.Option(
            help="Scores of the candidates, higher is better: JSON {candidate: score}, or a folder with "
            "CANDIDATE/eval.json of megatron-rl eval; default: eval in the plan's dir."
        ),
    ] = None,
    trained: Annotated[
        Path | None, typer.Option(help="The same for models that were trained on the mixtures of some candidates.")
    ] = None,
) -> None:
    """Print candidates, best first; with trained scores, whether merges order mixtures as training does."""
    from megatron_rl.checkpoint.mergemix import EVAL_FOLDER, MergeMixConfig, check_plan, cluster_warning, mixtures
    from megatron_rl.checkpoint.mergemix_rank import read_scores
    from megatron_rl.config.load import load_config

    config = load_config(plan, MergeMixConfig, overrides or [])
    check_plan(config)
    shares = mixtures(config)
    merged_scores = read_scores(merged or Path(config.dir) / EVAL_FOLDER, list(shares))
    trained_scores = {} if trained is None else read_scores(trained, list(shares))
    typer.echo(ranking_text(shares, merged_scores, trained_scores))
    if warning := cluster_warning(config):
        typer.echo(f"warning: {warning}", err=True)


def ranking_text(
    shares: Mapping[str, Mapping[str, float]], merged: Mapping[str, float], trained: Mapping[str, float]
) -> str:
    """Table of the candidates with a merged score, best first, and what it agrees with, as plain text."""
    from megatron_rl.checkpoint.mergemix_rank import rank_order
    from megatron_rl.telemetry.snr_text import aligned

    ranks, ranks_trained = rank_order(merged), rank_order(trained)
    clusters = list(next(iter(shares.values())))
    head = ["candidate", *clusters, "merged", "rank"] + (["trained", "rank"] if trained else [])
    rows: list[Sequence[str]] = [head]
    for name, place in ranks.items():
        row = [name, *(f"{shares[name][cluster]:.4g}" for cluster in clusters), f"{merged[name]:.4f}", f"{place:g}"]
        if trained:
            row += [f"{trained[name]:.4f}", f"{ranks_trained[name]:g}"] if name in trained else ["–", "–"]
        rows.append(row)
    blocks = [aligned(rows)]
    if unscored := [name for name in shares if name not in merged]:
        blocks.append(f"without a score: {', '.join(unscored)}")
    if trained:
        blocks.append(_agreement_text(merged, trained))
    return "\n\n".join(blocks)


def _agreement_text(merged: Mapping[str, float], trained: Mapping[str, float]) -> str:
    from megatron_rl.checkpoint.mergemix_rank import agreement

    found = agreement(merged, trained)
    if found is None:
        return "Spearman: not computed, it takes three candidates with both scores"
    if found.spearman is None or found.p_value is None:
        return f"Spearman: not defined, all scores on one side are equal ({found.num_candidates} candidates)"
    return (
        f"Spearman {found.spearman:.2f} between merged and trained scores of {found.num_candidates} candidates; "
        f"a random order is as far from 0 with probability {found.p_value:.2g}\n"
        f"best by merged score: {found.chosen}, by trained score number {found.chosen_rank:g} of "
        f"{found.num_candidates}, {found.loss:.4f} below the best"
    )
