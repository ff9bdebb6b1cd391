"""Saves that go wrong: killed, on a full disk, in a folder that takes nothing. What was saved before stays."""

import json
import runpy
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., None]
make_hf_model = runpy.run_path(str(Path(__file__).parents[1] / "hf_models.py"))["make_hf_model"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An HF folder of 400,000 parameters."""
    return make_hf_model(tmp_path_factory.mktemp("models") / "plain", "plain", 0)


@pytest.mark.parametrize(
    "num_kills", [4, pytest.param(50, marks=[pytest.mark.slow, pytest.mark.timeout(900)])], ids=["few", "many"]
)
def test_a_save_killed_at_any_moment_leaves_the_one_before(
    model: Path, tmp_path: Path, run_script: Run, num_kills: int
) -> None:
    """In the foreground and in the background; the next process resumes bit by bit from what is the latest then."""
    run_script("check_kills.py", 1, model, tmp_path, str(num_kills), timeout_s=800)
    result = json.loads((tmp_path / "kills.json").read_text())
    assert result["newest"] >= num_kills
    assert result["interrupted"] > 0, "some kills came while a folder was half written"


def with_small_disk(folder: Path, num_bytes: int) -> list[str] | None:
    """A command that runs another where folder is a file system of that size, seen by nobody else; None: not here."""
    mount = f'mount -t tmpfs -o size={num_bytes} tmpfs {folder} && exec "$@"'
    for unshare in (["unshare", "-m"], ["unshare", "-rm"]):
        command = [*unshare, "sh", "-c", mount, "sh"]
        if subprocess.run([*command, "true"], capture_output=True, check=False).returncode == 0:
            return command
    return None


def test_a_full_disk_is_one_clear_error_on_every_rank_and_nothing_is_lost(
    model: Path, tmp_path: Path, run_script: Run
) -> None:
    small = tmp_path / "small"
    small.mkdir()
    weights = (model / "model.safetensors").stat().st_size
    prefix = with_small_disk(small, int(weights * 3 * 1.6))
    run_script("check_full_disk.py", 2, model, tmp_path, small if prefix else "", prefix=prefix or ())
    first, second = (json.loads((tmp_path / f"errors-{rank}.json").read_text()) for rank in range(2))
    assert first == second, "every rank says the same"
    cause = "No space left on device" if prefix else "File too large"
    for case in ("full", "full, in the background"):
        assert cause in first[case] and "checkpoints" in first[case] and "step_000001 is the latest" in first[case]
        assert "\n" not in first[case]
    assert "File too large" in first["full on one rank"]
    assert "must hold the state of every rank" in first["no state on one rank"]
    assert "KeyError: 'exp_avg'" in first["no state on one rank"]
    assert "TypeError" in first["extra state that is no bytes"] and first["left of those"] == ""
    assert first["after it"] == "saved", "an error is reported once"
    assert first["left"] == "step_000001"
    refused = "Read-only file system" if prefix else "Not a directory"
    assert refused in first["cannot be written"]
