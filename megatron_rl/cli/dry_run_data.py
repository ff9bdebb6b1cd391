"""What a dry run says about SFT data: rows and tokens, steps of a pass, what the packing buffers hold."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.cli.runs import SftRun
from megatron_rl.data.mixture import pass_quotas
from megatron_rl.data.render import ChatRenderer
from megatron_rl.data.rows import open_rows
from megatron_rl.data.samples import CheckedRows, SampleRules, check_rows
from megatron_rl.data.sft import StreamPacking

Row = tuple[str, str]
"""A heading, empty in further lines of one, and a line of text."""


@dataclass(frozen=True)
class _Pass:
    """One pass over the training data, as far as the rows that were looked at tell."""

    samples: float
    tokens: float
    """0 without a tokenizer."""


def sft_data(run: SftRun, renderer: ChatRenderer | None, unchecked: list[str]) -> list[Row]:
    """Lines for the report; what is not on this machine goes to unchecked. DataError for a row that does not fit."""
    copies = run.run.processes // (run.parallel.model_ranks * run.parallel.context)
    train = _checked(run, [config.path for config in run.data.train], renderer, unchecked)
    heldout = _checked(run, run.data.heldout, renderer, unchecked)
    rows, one_pass = [], None
    if train:
        quotas = pass_quotas(run.data.train, [file.count for file in train])
        one_pass = _one_pass(train, quotas)
        rows += [("data", _shown(train)), *_left_out(train)]
        if len(train) > 1:
            labels = [config.label for config in run.data.train]
            shares = (f"{quota:,} of {label}" for quota, label in zip(quotas, labels, strict=True))
            rows.append(("", f"a pass draws {', '.join(shares)}"))
    packing = run.data.packing
    if packing.kind == "stream":
        rows += _stream_steps(run, packing, copies, one_pass)
    else:
        rows += _fixed_steps(run, copies, one_pass)
    if heldout:
        rows += [("held out", _shown(heldout)), *_left_out(heldout)]
    return rows


def microbatch_row(capacity: int, copies: int) -> Row:
    """Size of a microbatch and how many ranks share a step."""
    shared = f"; {copies} data-parallel ranks share a step" if copies > 1 else ""
    return "microbatch", f"at most {capacity:,} tokens{shared}"


def _checked(
    run: SftRun, paths: Sequence[str], renderer: ChatRenderer | None, unchecked: list[str]
) -> list[CheckedRows]:
    """What the files hold; nothing where one is not on this machine."""
    there = [path for path in paths if Path(path).exists()]
    unchecked += [f"data: no {path} here" for path in paths if path not in there]
    if renderer is None:
        unchecked += [f"data: length and rendering of the rows of {path}, without a tokenizer" for path in there]
    rules, limit = SampleRules.of(run.data, run.context_length), run.data.check_rows
    checked = [check_rows(open_rows(path), renderer, rules, limit) for path in there]
    for path, file in zip(there, checked, strict=True):
        if file.num_checked < file.count:
            unchecked.append(f"data: rows of {path} after the first {limit:,}, by data.check_rows")
    return checked if len(there) == len(paths) else []


def _one_pass(files: Sequence[CheckedRows], quotas: Sequence[int]) -> _Pass:
    samples = sum(quota * file.num_samples / file.num_checked for file, quota in zip(files, quotas, strict=True))
    tokens = sum(quota * file.num_tokens / file.num_checked for file, quota in zip(files, quotas, strict=True))
    return _Pass(samples, tokens)


def _shown(files: Sequence[CheckedRows]) -> str:
    conversations = f"{sum(file.count for file in files):,} conversations"
    tokens = sum(file.count * file.num_tokens / file.num_checked for file in files)
    if not tokens:
        return conversations
    about = "about " if any(file.num_checked < file.count for file in files) else ""
    return f"{conversations}, {about}{tokens:,.0f} tokens, the longest has {max(file.longest for file in files):,}"


def _left_out(files: Sequence[CheckedRows]) -> list[Row]:
    """A line for each reason for which rows are left out or cut."""
    lines = []
    for fate in dict.fromkeys(fate for file in files for fate, _ in file.changed):
        count = sum(dict(file.changed).get(fate, 0) for file in files)
        first = next((file.first_bad for file in files if file.first_bad), "") if fate == "bad" else ""
        lines.append(("", f"{count:,} of them {fate}" + (f", the first: {first}" if first else "")))
    return lines


def _fixed_steps(run: SftRun, copies: int, one_pass: _Pass | None) -> list[Row]:
    per_step = run.data.samples_per_step
    step = f"{per_step} conversations, at most {per_step * run.context_length:,} tokens"
    rows = []
    if one_pass is not None:
        step += f", {per_step * one_pass.tokens / one_pass.samples:,.0f} on average" if one_pass.tokens else ""
        rows.append(("", _passes(one_pass.samples / per_step, run.trainer.steps)))
    rows = [("step", step), *rows, microbatch_row(run.data.microbatch_tokens, copies)]
    if per_step < copies:
        rows.append(("warning", f"data.samples_per_step={per_step} leaves ranks without data: {copies} share a step"))
    return rows


def _stream_steps(run: SftRun, packing: StreamPacking, copies: int, one_pass: _Pass | None) -> list[Row]:
    per_step = packing.microbatches_per_step * copies
    tokens = per_step * run.data.microbatch_tokens
    rows = [("step", f"{per_step} microbatches, at most {tokens:,} tokens")]
    if one_pass is not None and one_pass.tokens:
        rows.append(("", _passes(one_pass.tokens / tokens, run.trainer.steps)))
    rows.append(microbatch_row(run.data.microbatch_tokens, copies))
    held = (packing.open_bins + packing.buffer) * run.data.microbatch_tokens
    bins = f"{packing.open_bins} open and {packing.buffer} packed microbatches"
    rows.append(("packing", f"each rank holds {bins}, at most {held:,} tokens"))
    if one_pass is not None and one_pass.tokens and held * copies > one_pass.tokens:
        passes = f"they hold {held * copies / one_pass.tokens:,.1f} passes of the data"
        rows.append(("warning", f"{passes}; lower data.packing.open_bins and data.packing.buffer"))
    return rows


def _passes(steps_of_pass: float, steps: int) -> str:
    return f"{steps_of_pass:,.1f} steps per pass; {steps:,} steps are {steps / steps_of_pass:.2f} passes"
