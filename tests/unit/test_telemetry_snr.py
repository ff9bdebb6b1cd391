"""Calibrations on disk, in the terminal and on the page: the same numbers, and one clear error for a damaged line."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from megatron_rl.cli.main import app
from megatron_rl.config import DataError
from megatron_rl.loss.snr import Streams, measure, record_metrics
from megatron_rl.telemetry.glossary import SECTIONS, matches
from megatron_rl.telemetry.report import build_report
from megatron_rl.telemetry.sinks import MetricsWriter, truncate_after
from megatron_rl.telemetry.snr_log import SNR_FILE, SnrLog, SnrRecord, read_snr
from megatron_rl.telemetry.snr_text import bin_cells, text_report
from megatron_rl.telemetry.values import Last


def streams(spread: float, *, tokens: int = 3000, seed: int = 0) -> Streams:
    random = np.random.default_rng(seed)
    logp = np.log(random.uniform(0.02, 0.97, tokens))
    log_ratio = spread * (1 - np.exp(logp)) * random.standard_normal(tokens)
    return Streams(logp, np.minimum(logp - log_ratio + np.square(log_ratio) / 2, 0))


@pytest.fixture(scope="module")
def records() -> list[SnrRecord]:
    """Before the first step, then with movement that grows."""
    first = [measure(streams(0.1), None, step=0, weight_version=0)]
    return first + [
        measure(streams(0.1, seed=n), streams(0.1 + 0.08 * n, seed=10 + n), step=20 * n, weight_version=20 * n)
        for n in range(1, 4)
    ]


@pytest.fixture
def run(tmp_path: Path, records: list[SnrRecord]) -> Path:
    """A run folder with calibrations, and metrics as the trainer writes them."""
    folder = tmp_path / "<b>run & co"
    log, metrics = SnrLog(folder), MetricsWriter(folder, tensorboard=False)
    for record in records:
        log.write(record)
        metrics.write(record.step, record_metrics(record), phase="rl")
    return folder


def test_what_is_written_is_read(run: Path, records: list[SnrRecord]) -> None:
    assert read_snr(run) == records


def test_a_torn_last_line_never_happened(run: Path, records: list[SnrRecord]) -> None:
    with (run / SNR_FILE).open("ab") as file:
        file.write(b'{"step": 80, "wei')
    assert read_snr(run) == records
    SnrLog(run).write(records[0])
    assert read_snr(run) == [*records, records[0]]


@pytest.mark.parametrize(("step", "kept"), [(0, []), (20, [0, 20]), (39, [0, 20]), (100, [0, 20, 40, 60])])
def test_a_resumed_run_keeps_what_it_will_not_write_again(run: Path, step: int, kept: list[int]) -> None:
    truncate_after(run, step, phase="sft")
    assert len(read_snr(run)) == 4
    truncate_after(run, step, phase="rl")
    assert [record.step for record in read_snr(run)] == kept


@pytest.mark.parametrize("line", ["not json", '{"step": 80}', '{"step": "eighty"}', "[]"])
def test_a_damaged_line_is_named_with_its_file(run: Path, line: str, error_of: Callable[..., str]) -> None:
    path = run / SNR_FILE
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:2], line, *lines[2:]]) + "\n")
    error = error_of("snr", str(run))
    assert f"{path}:3: every line must be a calibration" in error and "remove the line" in error
    with pytest.raises(DataError, match=r"snr\.jsonl:3"):
        build_report(run, run / "report.html")


def test_a_folder_that_is_no_run_is_one_clear_error(tmp_path: Path, error_of: Callable[..., str]) -> None:
    assert "snr needs an existing run folder" in error_of("snr", str(tmp_path / "nowhere"))
    (tmp_path / "file").write_text("")
    assert "snr needs an existing run folder" in error_of("snr", str(tmp_path / "file"))


def test_a_run_without_calibrations_says_how_to_get_them(tmp_path: Path, error_of: Callable[..., str]) -> None:
    error = error_of("snr", str(tmp_path))
    assert f"{tmp_path / SNR_FILE} has none; set trainer.snr" in error


def test_the_command_prints_the_newest_calibration_and_the_history(
    run: Path, records: list[SnrRecord], capsys: pytest.CaptureFixture[str]
) -> None:
    app(["snr", str(run)], standalone_mode=False)
    out, newest = capsys.readouterr().out, records[-1]
    assert "4 calibrations, the newest after step 60 with weights 60" in out and "identity holds" in out
    lines = out.splitlines()
    for row in newest.rows:
        shown = re.split(r"\s{2,}", next(line for line in lines if line.startswith(f"{row.low:g}–{row.high:g} ")))
        assert shown == list(bin_cells(row, newest.rows))
        assert row.snr is None or f"{row.snr:.3g} ± " in shown[5]
        assert shown[9] == f"{math.exp(row.lower):.4g} … {math.exp(row.upper):.4g}"
    assert f"verdict: {newest.verdict}: SNR {newest.snr:.3g} ± {newest.snr_error:.2g} over all bins" in out
    assert all(f"- {line}" in out for line in newest.advice) and all(f"note: {line}" in out for line in newest.notes)
    steps = [line.split()[0] for line in out.split("SNR over time")[1].splitlines() if line[:1].isdigit()]
    assert steps == ["0", "20", "40", "60"]
    assert f"{newest.calibration.k3:.4g}" in out and newest.live is not None and f"{newest.live.k3:.4g}" in out


def test_a_single_calibration_before_the_first_step_reads_well(records: list[SnrRecord]) -> None:
    text = text_report("run", records[:1])
    assert "1 calibration, the newest after step 0" in text and "noise only: no live window" in text
    assert "SNR over time" not in text and "None" not in text and "nan" not in text


def test_bins_with_too_few_tokens_say_what_stands_in(tmp_path: Path, records: list[SnrRecord]) -> None:
    thin = measure(streams(0.1, tokens=900), streams(0.2, tokens=5000, seed=1), step=80, weight_version=80)
    cells = [bin_cells(row, thin.rows) for row in thin.rows]
    assert [row.pool for row in thin.rows][:3] == [[0, 1, 2]] * 3 and cells[0][-1].endswith(", of 0–0.5 together")
    none = measure(streams(0.1, tokens=300), streams(0.2, tokens=5000, seed=1), step=100, weight_version=100)
    assert {bin_cells(row, none.rows)[-1] for row in none.rows} == {"too few tokens"}
    assert {bin_cells(row, none.rows)[7] for row in none.rows} == {"–"}, "no quantiles"
    MetricsWriter(tmp_path, tensorboard=False).write(1, {"x": Last(1)}, phase="rl")
    for record in (*records, thin, none):
        SnrLog(tmp_path).write(record)
    assert read_snr(tmp_path)[-1] == none
    page = build_report(tmp_path, tmp_path / "report.html").read_text(encoding="utf-8")
    section = page.split('<section id="snr">')[1].split("</section>")[0]
    assert "nan" not in section and "None" not in section and 'text-anchor="end">20<' not in section


def test_a_broken_identity_is_shown_with_its_cure() -> None:
    logp = np.log(np.random.default_rng(0).uniform(0.1, 0.9, 1000))
    record = measure(Streams(logp, logp - 0.1), None, step=0, weight_version=0)
    text = text_report("run", [record])
    assert "identity BROKEN (other)" in text and "compare both sides on one text" in text and "- stop: " in text


def test_the_page_shows_every_bin_its_bounds_and_the_verdict(run: Path, records: list[SnrRecord]) -> None:
    page = build_report(run, run / "report.html").read_text(encoding="utf-8")
    section = page.split('<section id="snr">')[1].split("</section>")[0]
    newest = records[-1]
    for row in newest.rows:
        name, *cells = bin_cells(row, newest.rows)
        assert f'<th scope="row">{name}</th>' + "".join(f"<td>{cell}</td>" for cell in cells) in section
    assert f"<b>{newest.verdict}: SNR {newest.snr:.3g} ± {newest.snr_error:.2g} over all bins</b>" in section
    assert '<a href="#snr">Signal or noise</a>' in page
    drawings = [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", section)]
    assert len(drawings) == 1 + len(newest.rows), "one for SNR, one for the bounds of each bin"
    for drawing in drawings:
        for element in drawing.iter():
            for name in ("d", "cx", "cy", "x", "y"):
                numbers = [float(number) for number in re.findall(r"-?[\d.]+", element.get(name, ""))]
                assert all(-1 <= number <= 320 for number in numbers) and "nan" not in element.get(name, "")
        assert drawing.get("aria-label")
    bounds = drawings[1].find(".//path[@class='band']")
    assert bounds is not None and bounds.get("d", "").count("L") == 2 * len(records) - 1


def test_the_higher_snr_is_drawn_higher(run: Path, records: list[SnrRecord]) -> None:
    section = build_report(run, run / "report.html").read_text(encoding="utf-8").split('<section id="snr">')[1]
    drawing = ElementTree.fromstring(re.findall(r"<svg.*?</svg>", section)[0])
    heights = [float(dot.get("cy", "")) for dot in drawing.findall(".//g[@class='k2']/circle")]
    snrs = [record.rows[2].snr or 0.0 for record in records[1:]]
    assert snrs == sorted(snrs) and heights == sorted(heights, reverse=True)


def test_without_calibrations_the_page_has_no_such_section(tmp_path: Path) -> None:
    MetricsWriter(tmp_path, tensorboard=False).write(1, {"x": Last(1)}, phase="rl")
    page = build_report(tmp_path, tmp_path / "report.html").read_text(encoding="utf-8")
    assert "#snr" not in page and 'id="snr"' not in page


def test_names_of_runs_stay_text_and_several_runs_have_a_part_each(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    MetricsWriter(other, tensorboard=False).write(1, {"x": Last(1)}, phase="rl")
    page = build_report([run, other], tmp_path / "report.html").read_text(encoding="utf-8")
    section = page.split('<section id="snr">')[1].split("</section>")[0]
    assert "<b>run" not in section and "<h3>&lt;b&gt;run &amp; co</h3>" in section and "<h3>other</h3>" not in section


def test_every_metric_of_a_calibration_has_its_words_on_the_page(records: list[SnrRecord]) -> None:
    patterns = [pattern for section in SECTIONS for panel in section.panels for pattern in panel.patterns]
    names = record_metrics(records[-1])
    assert len(names) >= 10
    assert [name for name in names if not any(matches(name, pattern) for pattern in patterns)] == []
