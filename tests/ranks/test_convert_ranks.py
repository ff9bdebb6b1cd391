"""Conversions between Hugging Face folders and Megatron checkpoints: bitwise, whoever shares them, in little memory."""

import hashlib
import json
import math
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron_rl.checkpoint.convert import convert
from megatron_rl.config import ConfigError
from megatron_rl.model.families import family_for

TOOL = "../../tools/convert_checkpoint.py"
Run = Callable[..., None]
make_hf_model = runpy.run_path(str(Path(__file__).parents[1] / "hf_models.py"))["make_hf_model"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of HF folders."""
    root = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(["plain", "tied", "glm"]):
        make_hf_model(root / name, name, seed)
    return root


def contents(folder: Path) -> dict[str, str]:
    """File name -> digest."""
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir() if file.is_file()}


def test_there_and_back_gives_the_same_bytes(models: Path, tmp_path: Path, run_script: Run) -> None:
    """Weights, config.json, tokenizer, as transformers has written them: whatever ranks shared the way there."""
    source, megatron, back = models / "plain", tmp_path / "megatron", tmp_path / "back"
    run_script(TOOL, 2, source, megatron)
    assert json.loads((megatron / "meta.json").read_text())["platform"] == "cpu"
    run_script(TOOL, 1, megatron, back)
    got, expected = contents(back), contents(source)
    assert got.keys() == expected.keys()
    for name in expected.keys() - {"config.json"}:
        assert got[name] == expected[name], name
    assert json.loads((back / "config.json").read_text()) == json.loads((source / "config.json").read_text())


@pytest.mark.parametrize(
    ("num_ranks", "num_checks"), [(2, 21), pytest.param(4, 8, marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)
def test_every_layout_reads_and_writes_the_same_tensors(
    models: Path, tmp_path: Path, run_script: Run, num_ranks: int, num_checks: int
) -> None:
    """Both families, bit by bit; on two ranks Megatron's own loader, several files and another dtype too."""
    run_script("check_convert.py", num_ranks, models, tmp_path, timeout_s=500)
    results = json.loads((tmp_path / "results.json").read_text())
    assert len(results) == num_checks
    assert results == {name: [] for name in results}


def test_a_conversion_never_holds_two_layers(models: Path, tmp_path: Path, run_script: Run) -> None:
    """The high-water mark of the process; one that holds the model fails the same measure."""
    config = json.loads((models / "plain" / "config.json").read_text())
    config.update(hidden_size=512, moe_intermediate_size=512, num_experts=16, num_hidden_layers=6)
    parts = family_for(config).weight_parts(config)
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(config))
    tensors = {part.name: torch.randn(part.shape) for part in parts}
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    two_layers = 2 * 4 * sum(math.prod(part.shape) for part in parts if part.layer == 0)
    give_back = ["env", f"MALLOC_MMAP_THRESHOLD_={2**18}"]  # or the allocator keeps what was freed
    run_script("check_convert_memory.py", 1, models / "plain", source, tmp_path, prefix=give_back)
    peaks = json.loads((tmp_path / "peaks.json").read_text())
    assert two_layers > 90 * 2**20, "large against the noise of an interpreter"
    assert peaks["streamed"] < two_layers and peaks["streamed back"] < two_layers
    assert peaks["whole"] > 2 * two_layers
    assert contents(tmp_path / "back")["model.safetensors"] == contents(source)["model.safetensors"]


def test_a_folder_that_cannot_be_converted_is_refused_at_once(models: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="state/"):
        convert(models / "plain", tmp_path / "out", direction="to_hf")
    with pytest.raises(ConfigError, match="no such folder"):
        convert(tmp_path / "absent", tmp_path / "out")


def test_tensors_that_do_not_fit_are_named_before_anything_is_written(
    models: Path, tmp_path: Path, run_script: Run
) -> None:
    """In both directions: missing, extra and misshapen ones; a checkpoint of another size. NaN leaves nothing too."""
    run_script("check_convert_errors.py", 1, models, tmp_path)
    errors = json.loads((tmp_path / "errors.json").read_text())
    assert "weight model.norm.weight is missing" in errors["hf"]
    assert "weight model.extra has no place" in errors["hf"]
    assert "lm_head.weight must have shape [512, 64] by config.json, got [2, 2]" in errors["hf"]
    assert "got NaN in the HF tensors of ['decoder.final_layernorm.weight']" in errors["nan"]
    assert "decoder.layers.0.pre_mlp_layernorm.weight is missing" in errors["another family"]
    assert "64] there and torch.float32" in errors["another size"] and "32] here" in errors["another size"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "broken",
        "errors.json",
        "megatron",
        "not_numbers",
        "smaller",
    ]


def test_a_damaged_checkpoint_is_refused_in_one_line(models: Path, tmp_path: Path) -> None:
    megatron = tmp_path / "megatron"
    command = [sys.executable, "-m", "megatron_rl.cli.main", "convert"]
    subprocess.run([*command, models / "plain", megatron], check=True, capture_output=True)
    stored = megatron / "state" / "__0_0.distcp"
    stored.write_bytes(stored.read_bytes()[:1000])
    done = subprocess.run([*command, megatron, tmp_path / "back"], capture_output=True, text=True, check=False)
    (error,) = [line for line in done.stderr.splitlines() if "error:" in line]
    assert done.returncode == 2 and f"checkpoint {megatron} must be whole" in error and "copy it again" in error
    assert "Traceback" not in done.stderr and not (tmp_path / "back").exists()
