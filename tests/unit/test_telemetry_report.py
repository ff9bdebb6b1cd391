"""The report page: its numbers are those of the run folder, no text of a model breaks it, it says what it omits."""

import html
import json
import math
import random
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.config.errors import ConfigError, DataError
from megatron_rl.telemetry.report import build_report, run_names, script_json
from megatron_rl.telemetry.report_curves import MAX_POINTS, Point, Series, build_charts, collect_series, thin
from megatron_rl.telemetry.report_rollouts import MAX_ROLLOUTS_PER_STEP, MAX_STEPS
from megatron_rl.telemetry.rollouts import RolloutLog, read_rollouts
from megatron_rl.telemetry.sinks import MetricsWriter, read_metrics
from megatron_rl.telemetry.values import Last, Rate

synthetic = runpy.run_path(str(Path(__file__).parents[1] / "synthetic_run.py"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    return [synthetic["write_sft_run"](folder / "sft"), synthetic["write_rl_run"](folder / "rl")]


@pytest.fixture(scope="module")
def page(runs: list[Path]) -> str:
    return build_report(runs, runs[0].parent / "deep" / "report.html").read_text(encoding="utf-8")


def data_of(page: str) -> dict[str, Any]:
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert match is not None
    return json.loads(match[1])


def close(got: float, exact: float | None) -> bool:
    return exact is not None and math.isclose(got, exact, rel_tol=1e-5, abs_tol=1e-300)


def test_every_number_of_the_record_is_on_the_page(runs: list[Path], page: str) -> None:
    data = data_of(page)
    seen = set()
    for run, run_dir in enumerate(runs):
        for record in read_metrics(run_dir):
            for name in record.keys() - {"time", "phase", "step"}:
                base, _, part = name.rpartition("/")
                is_part = part in ("low", "high", "n") and base in record
                wanted, stream = (base, part) if is_part else (name, "value")
                (series,) = [s for s in data["series"] if s["name"] == wanted and _run_of(s, data) == run]
                shown = series[stream][series["step"].index(record["step"])]
                seen.add((run, name))
                assert shown is None if record[name] is None else close(shown, record[name]), (name, record["step"])
    assert len(seen) > 40


def _run_of(series: dict[str, Any], data: dict[str, Any]) -> int:
    """SFT and RL share names such as grad_norm; the number of steps tells the runs apart."""
    return 0 if max(series["step"]) == 40 else 1


def test_every_series_is_drawn_once_and_unknown_metrics_go_to_the_others(page: str) -> None:
    data = data_of(page)
    drawn = [index for chart in data["charts"] for index, _ in chart["lines"]]
    assert sorted(drawn) == list(range(len(data["series"])))
    figures = page.split('<details id="others">')
    assert figures[0].count("<figure ") + figures[1].count("<figure ") == len(data["charts"])
    assert "<h4>a/metric/nobody/knows</h4>" in figures[1] and "<h4>signal/tool_well_formed</h4>" in figures[1]
    assert "<h4>Held-out pass rate</h4>" in figures[0]


def test_rollouts_on_the_page_are_those_of_the_log(runs: list[Path], page: str) -> None:
    (entry,) = data_of(page)["rollouts"]
    shown = {
        (step["step"], item["id"]): (group, item)
        for step in entry["steps"]
        for group in step["groups"]
        for item in group["items"]
    }
    records = list(read_rollouts(runs[1]))
    assert len(shown) == len(records) == entry["num_shown"]
    for record in records:
        group, item = shown[record.step, record.sample_id]
        assert group["prompt"] + item["tokens"] == record.tokens
        assert close(item["reward"], record.reward) and close(item["advantage"], record.advantage)
        trained = [t for t, is_trained in enumerate(record.trained) if is_trained]
        states = dict(zip(trained, item["state"], strict=True))
        for position, t in enumerate(trained):
            engine, policy = record.engine_logp[t], record.policy_logp[t]
            if engine is None or policy is None:
                assert states[t] == "x" and item["log_ratio"][position] is None
                continue
            assert states[t] == ("k" if record.kept[t] else "m")
            assert close(item["engine"][position], engine)
            assert math.isclose(item["log_ratio"][position], policy - engine, rel_tol=1e-3)
            assert close(item["scale"][position], record.gradient_scale[t])
            assert item["version"][position] == record.weight_version[t]


def test_no_text_leaves_its_place_and_nothing_is_fetched(page: str) -> None:
    assert page.count("<script") == page.count("</script>") == 2 and page.count("<style") == 1
    assert "a &amp; b &lt;c&gt;" in page, "the config is text"
    assert not re.search(r"https?://|\bsrc\s*=|@import|url\(|<link|<img|<iframe", page)
    assert re.search(r"default-src 'none'; style-src 'sha256-[^']{44}'; script-src 'sha256-[^']{44}'", page)
    assert "<!--" not in page, "every placeholder is filled, and no comment swallows what follows"


@pytest.mark.parametrize("text", [*synthetic["NASTY_TOKENS"], "]]>", "\u2029", "\\", '"', "<!-- <script>", "\x00"])
def test_script_json_gives_back_any_text_and_holds_no_markup(text: str) -> None:
    encoded = script_json([text])
    assert json.loads(encoded) == [text]
    assert not set("<>&\u2028\u2029") & set(encoded)


def test_half_a_surrogate_pair_does_not_stop_the_page() -> None:
    assert script_json(["\ud83d"]) == '["?"]'


def test_the_summary_table_shows_the_summary_file(runs: list[Path], page: str) -> None:
    for row in json.loads((runs[1] / "summary.json").read_text(encoding="utf-8")):
        cells = f"<td>{row['rate']:.3f}</td><td>{row['low']:.3f}–{row['high']:.3f}</td><td>{row['n']}</td>"
        assert f'<th scope="row">{row["name"]}</th>{cells}' in page


def test_without_a_summary_file_the_first_and_last_evaluation_stand_in(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "run", tensorboard=False)
    for step, passed in ((0, 10), (8, 20), (16, 80)):
        writer.write(step, {"eval/pass_rate/baker/new_texts": Rate(passed, 100)}, phase="rl")
    page = build_report(tmp_path / "run", tmp_path / "report.html").read_text(encoding="utf-8")
    rows = re.findall(r'<th scope="row">(step \d+)</th><td>([\d.]+)</td>', page)
    assert rows == [("step 0", "0.100"), ("step 16", "0.800")]
    assert "baker/new_texts" in page


def test_a_long_run_stays_small_and_says_what_it_left_out(tmp_path: Path) -> None:
    writer, log = MetricsWriter(tmp_path / "run", tensorboard=False), RolloutLog(tmp_path / "run")
    noise = random.Random(0)
    for step in range(1, 1501):
        peak = 1e6 if step == 777 else noise.random()
        writer.write(step, {f"m/{i}": Last(peak) for i in range(20)}, phase="rl")
    for step in range(1, 101):
        records = synthetic["rollout_records"](step, 40, skill=0.5, noise=noise)
        for record in records:
            for name in ("tokens", "trained", "engine_logp", "policy_logp", "kept", "gradient_scale", "weight_version"):
                setattr(record, name, getattr(record, name) * 12)
        log.write(step, records)
    out = build_report([tmp_path / "run"], tmp_path / "report.html")
    assert out.stat().st_size < 5e6
    page = out.read_text(encoding="utf-8")
    data = data_of(page)
    (entry,) = data["rollouts"]
    steps = [step["step"] for step in entry["steps"]]
    assert len(steps) == MAX_STEPS and steps[0] == 1 and steps[-1] == 100
    assert all(1 <= sum(len(g["items"]) for g in step["groups"]) <= MAX_ROLLOUTS_PER_STEP for step in entry["steps"])
    assert f"{entry['num_shown']} of 4000 logged ones, from 30 of 100 steps" in page
    for series in data["series"]:
        assert len(series["step"]) <= MAX_POINTS and (series["step"][0], series["step"][-1]) == (1, 1500)
        assert 777 in series["step"], "thinning keeps peaks"
    assert "20 of 20 are thinned" in page


def test_thinning_keeps_the_order_and_gaps() -> None:
    points = tuple(Point(step, None if step % 7 else float(step)) for step in range(1000))
    thinned = thin(Series(0, "rl", "x", points), 100)
    assert len(thinned.points) <= 100 and thinned.thinned_from == 1000
    assert [p.step for p in thinned.points] == sorted({p.step for p in thinned.points})


def test_several_runs_of_one_phase_share_their_charts_by_name() -> None:
    records = [{"step": 1, "phase": "rl", "time": 0.0, "loss/total": 1.0, "loss/policy": 2.0}]
    series = [*collect_series(records, run=0), *collect_series(records, run=1)]
    charts, others = build_charts(series, ["seed-0", "seed-1"])
    assert not others and [chart.panel.title for chart in charts] == ["Loss"]
    labels = [label for _, label in charts[0].lines]
    assert labels == ["total · seed-0", "total · seed-1", "policy · seed-0", "policy · seed-1"]


def test_a_step_that_was_written_twice_counts_once_with_its_later_value() -> None:
    records = [{"step": s, "phase": "rl", "x": v} for s, v in ((1, 1.0), (2, 2.0), (2, 3.0))]
    (series,) = collect_series(records, run=0)
    assert [(p.step, p.value) for p in series.points] == [(1, 1.0), (2, 3.0)]


def test_runs_with_the_same_folder_name_are_told_apart() -> None:
    assert run_names([Path("/x/a/rl"), Path("/x/b/rl")]) == ["a/rl", "b/rl"]
    assert run_names([Path("/x/a/rl"), Path("/x/a/rl")]) == ["rl (1)", "rl (2)"]


def test_names_with_markup_stay_text(tmp_path: Path) -> None:
    run = tmp_path / "<i>run & co"
    MetricsWriter(run, tensorboard=False).write(1, {"<b>metric</b>": Last(1)}, phase="<u>")
    page = build_report(run, tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<i>" not in page.split('id="rollouts"')[0] and "<b>metric" not in page and "<u>" not in page
    assert html.escape("<b>metric</b>") in page


def test_a_folder_that_is_no_run_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"needs an existing run folder, got .*nowhere"):
        build_report(tmp_path / "nowhere", tmp_path / "report.html")
    with pytest.raises(ConfigError, match=r"metrics\.jsonl has none"):
        build_report(tmp_path, tmp_path / "report.html")
    MetricsWriter(tmp_path, tensorboard=False).write(1, {"x": Last(1)}, phase="rl")
    (tmp_path / "summary.json").write_text('[{"name": "x"}]', encoding="utf-8")
    with pytest.raises(DataError, match=r"summary\.json: must be a list of rows with name, split"):
        build_report(tmp_path, tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()
