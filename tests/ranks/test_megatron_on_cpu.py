"""Every patch of Megatron on the CPU is needed, and none of them reaches torch itself."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

EXPECTED = {
    "random_states": "CUDA",
    "seeding": "draw the same initial weights",
    "collective_buffers": "CUDA",
    "gradient_buffers": "CUDA",
    "optimizer_scalars": "CUDA",
    "gradient_norm": "CUDA",
    "gradient_clipping": "AssertionError",
    "bf16_master_weights": "Wrapped parameters must be one of torch.cuda",
    "pipeline_buffers": "CUDA",
    "schedule_counter": "CUDA",
}
"""Patch -> what a training step says without it."""


@pytest.fixture(scope="module")
def outcome(
    model_folder: Path, tmp_path_factory: pytest.TempPathFactory, run_script: Callable[..., None]
) -> dict[str, str]:
    """What check_patches.py saw."""
    out = tmp_path_factory.mktemp("patches") / "outcome.json"
    run_script("check_patches.py", 1, model_folder / "plain", out)
    return json.loads(out.read_text())


def test_a_training_step_runs_with_all_patches(outcome: dict[str, str]) -> None:
    assert outcome[""] == ""


def test_every_patch_is_known_here(outcome: dict[str, str]) -> None:
    assert set(outcome) == {"", *EXPECTED}


@pytest.mark.parametrize("patch", EXPECTED)
def test_without_the_patch_something_fails_or_differs(outcome: dict[str, str], patch: str) -> None:
    assert EXPECTED[patch] in outcome[patch]


def test_torch_and_transformers_are_untouched_by_the_patches(model_folder: Path) -> None:
    """A model that transformers loads after the patches has the RoPE frequencies it would have without."""
    code = """
import sys, torch
before = {n: getattr(torch.cuda, n) for n in ("current_device", "manual_seed", "get_rng_state", "Stream")}
functions = (torch.empty, torch.zeros, torch.tensor, torch.compile, torch.Tensor.type, torch.Tensor.cuda)
from megatron_rl.distributed.device import start_platform
start_platform("cpu")
assert "torch._inductor.compile_fx" not in sys.modules, "importing Megatron must not load the compiler"
assert all(getattr(torch.cuda, n) is f for n, f in before.items())
assert functions == (torch.empty, torch.zeros, torch.tensor, torch.compile, torch.Tensor.type, torch.Tensor.cuda)
from transformers import Qwen3MoeForCausalLM
rope = Qwen3MoeForCausalLM.from_pretrained(sys.argv[1]).model.rotary_emb
exact = 1.0 / 10000.0 ** (torch.arange(0, 32, 2, dtype=torch.float64) / 32)
assert (rope.inv_freq.double() - exact).abs().max() < 1e-6, rope.inv_freq
"""
    done = subprocess.run([sys.executable, "-c", code, str(model_folder / "tied")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
