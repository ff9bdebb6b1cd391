"""One HTML page per run: opens from disk, asks for nothing on the network, holds its own data.

Numbers come from metrics.jsonl, rollouts.jsonl, snr.jsonl, summary.json and config.yaml of the run folders. The page's
Content-Security-Policy allows exactly its own script and style (by hash): no text of a model can run or load anything.
"""

import base64
import hashlib
import html
import json
import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any

from megatron_rl.config.errors import ConfigError, DataError
from megatron_rl.telemetry.report_curves import (
    Chart,
    Series,
    build_charts,
    collect_series,
    series_json,
    thin_all,
)
from megatron_rl.telemetry.report_rollouts import choose_rollouts
from megatron_rl.telemetry.report_snr import LINK, snr_section
from megatron_rl.telemetry.report_tables import metrics_table, summary_table
from megatron_rl.telemetry.sinks import METRICS_FILE, read_metrics

SUMMARY_FILE = "summary.json"
CONFIG_FILE = "config.yaml"

SUMMARY_KEYS = ("name", "split", "rate", "low", "high", "n")


def build_report(run_dirs: Sequence[Path] | Path, out: Path) -> Path:
    """Writes the page of one or more run folders, in the given order, atomically; returns out.

    ConfigError if a folder is missing or has no metrics; DataError (file and line) if one of its files is damaged.
    """
    folders = [run_dirs] if isinstance(run_dirs, Path) else list(run_dirs)
    records = [_records(folder) for folder in folders]
    names = run_names(folders)
    everything = [one for run, of_run in enumerate(records) for one in collect_series(of_run, run=run)]
    series = thin_all(everything)
    charts, others = build_charts(series, names)
    rollouts = choose_rollouts(folders)
    snr = snr_section(folders, names)
    data = {
        "runs": names,
        "series": series_json(series),
        "charts": [_chart_json(chart) for chart in [*charts, *others]],
        "rollouts": rollouts,
    }
    page = _fill(
        _asset("page.html"),
        {
            "TITLE": html.escape("Run report: " + ", ".join(names)),
            "RUNS": _runs_html(names, folders, records),
            "SUMMARY": summary_table(_summary_rows(folders, everything, names)),
            "CHARTS": _charts_html(charts, start=0),
            "SNR": snr,
            "SNR_LINK": LINK if snr else "",
            "OTHERS": _charts_html(others, start=len(charts)),
            "NUM_OTHERS": str(len(others)),
            "CONFIGS": _configs_html(names, folders),
            "METRICS": metrics_table(everything, names),
            "LEFT_OUT": _left_out_html(names, series, rollouts),
            "DATA": script_json(data),
        },
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f"{out.name}.{os.getpid()}.tmp")
    temporary.write_text(page, encoding="utf-8")
    temporary.replace(out)
    return out


def script_json(data: Any) -> str:
    """JSON that may stand inside a script element whatever texts it holds: no <, >, & and no line separators."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text.encode("utf-8", errors="replace").decode("utf-8")


def run_names(folders: Sequence[Path]) -> list[str]:
    """The shortest ends of the folders' paths that differ from each other."""
    parts = [folder.resolve().parts for folder in folders]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(p[-length:]) for p in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{folder.name} ({number})" for number, folder in enumerate(folders, start=1)]


def _records(folder: Path) -> list[dict[str, Any]]:
    if not folder.is_dir():
        raise ConfigError(f"a report needs an existing run folder, got {folder}; give the run.dir of a run")
    records = read_metrics(folder)
    if not records:
        raise ConfigError(
            f"a report needs metrics, but {folder / METRICS_FILE} has none; it appears with the run's first step"
        )
    return records


def _summary_rows(
    folders: Sequence[Path], series: Sequence[Series], names: Sequence[str]
) -> list[tuple[str, dict[str, Any]]]:
    """(split, row) of the last summary.json, or of the first and last evaluation of each run without one."""
    for folder in reversed(folders):
        path = folder / SUMMARY_FILE
        if path.exists():
            return [(row["split"], row) for row in _read_summary(path)]
    rows = []
    for one in series:
        if not (one.name.startswith("eval/pass_rate/") and one.is_rate):
            continue
        prefix = f"{names[one.run]}, " if len(names) > 1 else ""
        for point in dict.fromkeys((one.points[0], one.points[-1])):
            if point.value is not None:
                numbers = {"rate": point.value, "low": point.low, "high": point.high, "n": point.n}
                name = f"{prefix}step {point.step}"
                rows.append((one.name.removeprefix("eval/pass_rate/"), {"name": name, **numbers}))
    return rows


def _read_summary(path: Path) -> list[dict[str, Any]]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path}: must be JSON: {error}; run the evaluation again or remove the file") from error
    if not isinstance(rows, list) or not all(map(_is_summary_row, rows)):
        raise DataError(f"{path}: must be a list of rows with {', '.join(SUMMARY_KEYS)}; remove the file")
    return rows


def _is_summary_row(row: Any) -> bool:
    if not isinstance(row, dict) or not set(SUMMARY_KEYS) <= row.keys():
        return False
    return all(isinstance(row[key], float | int) for key in SUMMARY_KEYS if key not in ("name", "split"))


def _chart_json(chart: Chart) -> dict[str, Any]:
    return {"title": chart.panel.title, "log": chart.panel.log, "lines": [list(line) for line in chart.lines]}


def _charts_html(charts: Sequence[Chart], *, start: int) -> str:
    """Every chart's frame and words, by section; the page's script draws into .plot."""
    parts: list[str] = []
    section = None
    for number, chart in enumerate(charts, start=start):
        if chart.section != section:
            parts += ["</div>"] if section is not None else []
            parts.append(f'<h3>{html.escape(chart.section)}</h3><div class="charts">')
            section = chart.section
        about = f"<p>{html.escape(chart.panel.about)}</p>" if chart.panel.about else ""
        parts.append(
            f'<figure data-chart="{number}"><figcaption><h4>{html.escape(chart.panel.title)}</h4>{about}</figcaption>'
            '<div class="legend"></div><div class="plot"></div></figure>'
        )
    return "".join([*parts, "</div>" if charts else ""])


def _runs_html(names: Sequence[str], folders: Sequence[Path], records: Sequence[Sequence[Mapping[str, Any]]]) -> str:
    lines = []
    for name, folder, of_run in zip(names, folders, records, strict=True):
        phases = []
        for phase in dict.fromkeys(record["phase"] for record in of_run):
            steps = max(record["step"] for record in of_run if record["phase"] == phase)
            phases.append(f"{phase.upper()}, {steps} steps")
        times = [record["time"] for record in of_run if isinstance(record.get("time"), int | float)]
        when = f"{_when(min(times))} to {_when(max(times))} UTC" if times else ""
        lines.append(
            f"<dt>{html.escape(name)}</dt><dd>{html.escape('; '.join(phases))}. {when}. "
            f"<span class=path>{html.escape(str(folder))}</span></dd>"
        )
    return f"<dl class=runs>{''.join(lines)}</dl>"


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")


def _configs_html(names: Sequence[str], folders: Sequence[Path]) -> str:
    parts = []
    for name, folder in zip(names, folders, strict=True):
        path = folder / CONFIG_FILE
        if path.exists():
            text = html.escape(path.read_text(encoding="utf-8", errors="replace"))
            parts.append(f"<details><summary>{html.escape(name)}</summary><pre>{text}</pre></details>")
    return "".join(parts) or "<p>The run folders hold no config.yaml.</p>"


def _left_out_html(names: Sequence[str], series: Sequence[Series], rollouts: Sequence[Mapping[str, Any]]) -> str:
    """What the page does not show, so that nobody takes it for the whole."""
    lines = []
    for entry in rollouts:
        if entry["num_shown"] < entry["num_logged"]:
            lines.append(
                f"Rollouts of {names[entry['run']]}: {entry['num_shown']} of {entry['num_logged']} logged ones, "
                f"from {len(entry['steps'])} of {entry['num_steps_logged']} steps; all are in rollouts.jsonl."
            )
    thinned = sum(1 for one in series if one.thinned_from)
    if thinned:
        lines.append(
            f"Curves: {thinned} of {len(series)} are thinned to their first, last, least and greatest values "
            "in even stretches; all values are in metrics.jsonl."
        )
    return "".join(f"<li>{html.escape(line)}</li>" for line in lines) or "<li>Nothing.</li>"


def _asset(name: str) -> str:
    return (resources.files("megatron_rl.telemetry") / "page" / name).read_text(encoding="utf-8")


def _fill(template: str, parts: Mapping[str, str]) -> str:
    """The template with its style, its script and their hashes, and each <!--NAME--> replaced by its part, once."""
    style, script = _asset("page.css"), _asset("charts.js") + _asset("rollouts.js")
    parts = {
        **parts,
        "STYLE": style,
        "SCRIPT": script,
        "STYLE_HASH": _csp_hash(style),
        "SCRIPT_HASH": _csp_hash(script),
    }
    pieces = template.split("<!--")
    page = [pieces[0]]
    for piece in pieces[1:]:
        name, _, rest = piece.partition("-->")
        page += [parts[name], rest]
    return "".join(page)


def _csp_hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
