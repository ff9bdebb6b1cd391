"""The study of regularisers: its settings are configs that exist, and its page says what the run folders hold."""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from megatron_rl.cli.no_effect import check_rl_options
from megatron_rl.config import ConfigError
from megatron_rl.config.load import dump_config
from megatron_rl.telemetry.sinks import MetricsWriter
from megatron_rl.telemetry.values import Mean, Rate

STUDY = Path(__file__).parents[2] / "examples" / "studies" / "regularisers"
STEPS = 30


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """import of a module of the study by name."""
    monkeypatch.syspath_prepend(STUDY)

    def load(name: str) -> Any:
        if name != "run":
            return importlib.import_module(name)
        spec = importlib.util.spec_from_file_location("run_regularisers", STUDY / "run.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


def write_run(folder: Path, setting: str, seed: int, *, gain: float, with_kl: bool = True, until: int = STEPS) -> None:
    """Metrics of one run whose curves rise by gain over its steps."""
    writer = MetricsWriter(folder / f"{setting}-seed{seed}", tensorboard=False)
    place = "baker/new_texts"
    for step in range(until + 1):
        share = gain * step / STEPS
        metrics: dict[str, Any] = {"reward/mean": Mean(0.3 + share, 1), "entropy": Mean(0.5 - share, 1)}
        if with_kl:
            metrics["kl/reference_k3"] = Mean(share / 10, 1)
        if step:
            writer.write(step, metrics, phase="rl")
        if step in (0, STEPS):
            held_out = {
                f"eval/pass_rate/{place}": Rate(24 * (0.25 + share), 24),
                f"eval/pass_at/8/{place}": Rate(24 * 0.75, 24),
                f"eval/distinct_answers/{place}": Mean(6 - share, 1),
                f"eval/entropy_estimate/{place}": Mean(0.5 - share, 1),
            }
            writer.write(step, held_out, phase="rl")


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Three seeds of one setting, one of another without KL, and one run that is half done."""
    folder = tmp_path / "runs"
    for seed, gain in enumerate((0.1, 0.2, 0.3)):
        write_run(folder, "none", seed, gain=gain)
    write_run(folder, "entropy_0.03", 0, gain=0.4, with_kl=False)
    write_run(folder, "k3plus_1", 0, gain=0.4, until=STEPS - 1)
    return folder


def test_every_setting_is_a_config_whose_options_all_have_an_effect(study: Callable[[str], Any]) -> None:
    run, settings = study("run"), study("settings")
    plain = run.study_run(Path("runs"), "none", 0, start=Path("model"), steps=None)
    for name in settings.SETTINGS:
        changed = run.study_run(Path("runs"), name, 0, start=Path("model"), steps=None)
        check_rl_options(changed)
        assert name == "none" or changed.model_copy(update={"run": plain.run}) != plain, name
    drawn = {setting for column in settings.COLUMNS.values() for setting in column}
    assert drawn == set(settings.SETTINGS) and len(settings.SETTINGS) == 11


def test_the_table_holds_mean_and_spread_over_the_seeds_of_finished_runs(
    study: Callable[[str], Any], runs: Path
) -> None:
    results = study("results")
    table = results.markdown_table(results.read_study(runs, steps=STEPS)).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    assert cells[0][2:] == ["pass@1", "pass@8", "distinct of 8", "entropy", "KL to the start", "reward"]
    start, none, entropy = cells[2:]
    assert start[:4] == ["start", "", "0.250 (0.250–0.250)", "0.750 (0.750–0.750)"]
    assert none[:5] == ["no regulariser", "3", "0.450 (0.350–0.550)", "0.750 (0.750–0.750)", "5.80 (5.70–5.90)"]
    last_five = 28 / 30
    assert none[6] == f"{0.02 * last_five:.4f} ({0.01 * last_five:.4f}–{0.03 * last_five:.4f})"
    assert none[7] == f"{0.3 + 0.2 * last_five:.3f} ({0.3 + 0.1 * last_five:.3f}–{0.3 + 0.3 * last_five:.3f})"
    assert entropy[:3] == ["entropy bonus, 0.03", "1", "0.650"] and entropy[6] == "–"


def test_the_figure_is_well_formed_and_draws_inside_its_frame(study: Callable[[str], Any], runs: Path) -> None:
    results, settings = study("results"), study("settings")
    figure = study("figure")
    svg = figure.figure_svg(results.read_study(runs, steps=STEPS))
    root = ElementTree.fromstring(svg)
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    texts = [element.text or "" for element in root.findall(".//{*}text")]
    assert {setting.label for setting in settings.SETTINGS.values()} <= set(texts)
    assert {*settings.COLUMNS, *results.CURVES} <= set(texts)
    lines = [
        element.attrib["d"] for element in root.findall(".//{*}path") if element.attrib.get("stroke-width") == "1.6"
    ]
    assert len(lines) == 3 * 3 + 2, "none in each of nine panels, the entropy bonus without KL in two"
    for line in lines:
        points = [tuple(map(float, point.split())) for point in line.removeprefix("M").split("L")]
        assert len(points) == STEPS
        assert all(0 <= x <= width and 0 <= y <= height for x, y in points)
        assert [x for x, _ in points] == sorted(x for x, _ in points)
    last_reward = float(lines[0].split()[-1])
    assert last_reward == pytest.approx(figure._TOP + figure._PANEL_H * (1 - 0.5 / 0.8), abs=0.05), "0.5, axis to 0.8"


@pytest.mark.parametrize(("greatest", "top"), [(0.234, 0.3), (1.0, 1.0), (8.1, 10.0), (1.01e-3, 1.5e-3), (0.0, 1.0)])
def test_an_axis_ends_at_a_round_number_above_the_greatest_value(
    study: Callable[[str], Any], greatest: float, top: float
) -> None:
    assert study("figure")._top_of({"none": [(1, 0.0, 0.0, greatest)]}) == pytest.approx(top)


def test_a_new_page_is_made_and_a_written_one_keeps_its_words(
    study: Callable[[str], Any], runs: Path, tmp_path: Path
) -> None:
    run, page = study("run"), tmp_path / "docs" / "regularisers.md"
    with pytest.raises(ConfigError, match="needs a finished run"):
        run.write_page(tmp_path / "nothing", page, steps=STEPS)
    assert not page.exists()
    run.write_page(runs, page, steps=STEPS)
    page.write_text(page.read_text() + "\n## What was seen\n\nMuch.\n")
    write_run(runs, "k3plus_0.3", 0, gain=0.1)
    run.write_page(runs, page, steps=STEPS)
    text = page.read_text()
    assert text.startswith("# Regularisers") and text.endswith("\n## What was seen\n\nMuch.\n")
    assert text.count("no regulariser |") == 1 and text.count("KL k3+, 0.3 |") == 1
    assert "5 runs of 30 steps" in text and "regularisers.svg" in text
    assert (tmp_path / "docs" / "regularisers.svg").exists()


def test_finished_runs_are_skipped_and_a_folder_with_other_settings_is_refused(
    study: Callable[[str], Any], runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = study("run")
    started: list[str] = []
    monkeypatch.setattr(run, "run_rl", lambda job: started.append(job.run.folder.name))
    done = run.study_run(runs, "none", 0, start=Path("model"), steps=None)
    (done.run.folder / "config.yaml").write_text(dump_config(done))
    run.run_study(runs, ["none", "k3plus_1"], [0, 1], steps=None, start=Path("model"))
    assert started == ["k3plus_1-seed0", "k3plus_1-seed1"], "the first was half done"
    run.run_study(runs, ["none"], [0], steps=STEPS + 1, start=Path("model"))
    assert started[2:] == ["none-seed0"], "a longer study goes on"
    with pytest.raises(ConfigError, match=r"model\.path; remove it"):
        run.run_study(runs, ["none"], [0], steps=None, start=Path("other"))


def test_a_run_that_fails_is_reported_and_the_others_go_on(
    study: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = study("run")
    started: list[str] = []

    class Failed(Exception):
        pass

    def fail_first(job: Any) -> None:
        started.append(job.run.folder.name)
        if len(started) == 1:
            raise Failed("engine-0 died")

    monkeypatch.setattr(run, "RunFailed", Failed)
    monkeypatch.setattr(run, "run_rl", fail_first)
    failures = run.run_study(tmp_path, ["none", "k3plus_1"], [0], steps=2, start=Path("model"))
    assert failures == {str(tmp_path / "none-seed0"): "engine-0 died"}
    assert started == ["none-seed0", "k3plus_1-seed0"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "--settings", "none,kl"], "got kl"),
        (["run", "--steps", "0"], "from 1 on, got 0"),
        (["run", "--seeds", "0,x"], "got x"),
    ],
)
def test_options_that_do_not_exist_are_refused(
    study: Callable[[str], Any], capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    with pytest.raises(SystemExit):
        study("run").parse(arguments)
    assert said in capsys.readouterr().err


@pytest.fixture(autouse=True)
def forget_modules() -> Any:
    """Short names such as settings must not stay for other tests."""
    yield
    for name in ("settings", "results", "figure"):
        sys.modules.pop(name, None)
