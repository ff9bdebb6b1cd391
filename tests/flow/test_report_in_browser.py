"""The report page in a real browser, from disk: its script runs, it asks nothing of the network, it is not blank."""

import json
import re
import runpy
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from megatron_rl.telemetry.report import build_report

pytestmark = pytest.mark.slow

synthetic = runpy.run_path(str(Path(__file__).parents[1] / "synthetic_run.py"))

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
ROLLOUTS_PER_STEP = 16


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    sft, rl = synthetic["write_sft_run"](folder / "sft"), folder / "rl"
    synthetic["write_rl_run"](rl, rollouts_per_step=ROLLOUTS_PER_STEP)
    return build_report([sft, rl], folder / "report.html")


def browse(page: Path, profile: Path, *arguments: str) -> tuple[str, str, list[str]]:
    """(stdout, the page's console, URLs the page asked for) of a headless browser whose every connection is refused.

    Browsers also ask for things of their own: in their network log, only a page's requests have an origin as initiator.
    """
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.fail(f"this test needs one of {', '.join(BROWSERS)} on the PATH; on Debian: apt-get install chromium")
    net_log = profile.with_name("network.json")
    done = subprocess.run(
        [
            browser,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-background-networking",
            "--no-first-run",
            "--hide-scrollbars",
            "--enable-logging=stderr",
            f"--user-data-dir={profile}",
            "--proxy-server=http://127.0.0.1:9",
            "--proxy-bypass-list=<-loopback>",
            "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
            f"--log-net-log={net_log}",
            "--virtual-time-budget=5000",
            *arguments,
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    console = "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)
    events = json.loads(net_log.read_text(encoding="utf-8"))["events"]
    starts = [event.get("params", {}) for event in events if "initiator" in event.get("params", {})]
    return done.stdout, console, [start["url"] for start in starts if start["initiator"] != "not an origin"]


def test_the_page_draws_itself_and_asks_for_nothing(page: Path, tmp_path: Path) -> None:
    dom, console, requests = browse(page, tmp_path / "profile", "--dump-dom")
    assert requests == []
    assert console == ""
    assert dom.count('class="rollout"') == ROLLOUTS_PER_STEP, "one article for each rollout of the step shown first"
    figures = re.findall(r"<figure .*?</figure>", dom, re.DOTALL)
    assert len(figures) > 20
    shown = dom.split('<details id="others">')[0]
    for figure in re.findall(r"<figure .*?</figure>", shown, re.DOTALL):
        assert re.search(r'<path class="line" d="M[\d.]+ [\d.]+', figure), figure[:300]
    drawn = dom.split('<script type="application/json"')[0]
    assert "NaN" not in drawn and "undefined" not in drawn
    assert "<script" not in drawn and "&lt;script&gt;" in drawn, "a token is text, never an element"


@pytest.mark.parametrize("dark", [False, True])
def test_the_screenshot_is_not_blank(page: Path, tmp_path: Path, dark: bool) -> None:
    shot = tmp_path / "page.png"
    theme = ["--blink-settings=preferredColorScheme=0"] if dark else ["--blink-settings=preferredColorScheme=1"]
    _, _, requests = browse(page, tmp_path / "profile", f"--screenshot={shot}", "--window-size=1280,4000", *theme)
    assert requests == []
    pixels = np.asarray(Image.open(shot).convert("RGB")).astype(int)
    assert pixels.shape == (4000, 1280, 3)
    paper = pixels[2, 2]
    assert (paper.mean() < 60) == dark
    drawn = np.abs(pixels - paper).max(axis=-1) > 40
    assert 0.01 < drawn.mean() < 0.5
    for start in range(0, 4000, 500):
        assert drawn[start : start + 500].any(), f"nothing is drawn in rows {start} to {start + 500}"


def test_a_page_that_does_ask_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(
        '<!doctype html><img src="http://127.0.0.1:8080/pixel.png">'
        '<script>fetch("https://example.org/x").catch(() => 0); console.error("x")</script>'
    )
    _, console, requests = browse(page, tmp_path / "profile", "--dump-dom")
    assert sorted(requests) == ["http://127.0.0.1:8080/pixel.png", "https://example.org/x"]
    assert console
