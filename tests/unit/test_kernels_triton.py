"""The heads' Triton kernels without a GPU: compiled, and run in Triton's interpreter, which computes on the CPU."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

CHECK = Path(__file__).parents[1] / "check_kernels.py"
BESIDE = Path(sys.prefix) / "triton"
"""Where make test-all puts Triton: on the path of every process it would change what other packages do."""
pytestmark = pytest.mark.slow


def printed(mode: str, **env: str) -> str:
    """What check_kernels.py printed."""
    assert find_spec("triton") or BESIDE.exists(), "Triton is missing: make .venv/triton/.installed"
    done = subprocess.run(
        [sys.executable, str(CHECK), mode],
        env={**os.environ, "PYTHONPATH": str(BESIDE), **env},
        capture_output=True,
        text=True,
        timeout=290,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return done.stdout


def test_kernels_stay_in_the_error_budget_of_the_heads() -> None:
    """Values and gradients; odd sizes, several blocks, far from zero, float32 and bfloat16."""
    assert "in budget: 34 cases" in printed("cpu", TRITON_INTERPRET="1")


def test_kernels_compile_to_machine_code(tmp_path: Path) -> None:
    assert "compiled: 5 kernels" in printed("compile", TRITON_CACHE_DIR=str(tmp_path), TRITON_DEFAULT_FP_FUSION="1")
