"""Layouts and folders that do not fit: one line at the start that gives rule, value and cure."""

import json
import os
import runpy
import shutil
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

INPUT = runpy.run_path(str(Path(__file__).parents[1] / "cli_input.py"))
sft, rl, write_checkpoint = INPUT["sft"], INPUT["rl"], INPUT["write_checkpoint"]

LAYOUTS = {
    "heads": ("parallel.tensor=3 run.processes=3", "num_attention_heads must", "4 and 3", "parallel.tensor"),
    "kv heads": ("parallel.tensor=4 run.processes=4", "num_key_value_heads must", "2 and 4", "parallel.tensor"),
    "experts": ("parallel.expert=3 run.processes=3", "num_experts must", "8 and 3", "parallel.expert"),
    "expert width": (
        "parallel.expert_tensor=3 run.processes=3",
        "moe_intermediate_size must",
        "128 and 3",
        "parallel.expert_tensor",
    ),
    "empty stage": (
        "parallel.pipeline=5 run.processes=5",
        "parallel.pipeline must leave no stage empty",
        "5 stages for 4 layers",
        "at most 4",
    ),
    "ranks, tensor": ("parallel.tensor=2", "must be a multiple of parallel's tensor", "1 ranks for 2", "run.processes"),
    "ranks, pipeline": ("parallel.pipeline=2 run.processes=3", "must be a multiple", "3 ranks for", "run.processes"),
    "ranks, context": ("parallel.context=2", "must be a multiple", "1 ranks for 1 * 2", "run.processes"),
    "ranks, expert": ("parallel.expert=4 run.processes=2", "expert * expert_tensor", "2 ranks for 4", "run.processes"),
    "context": ("parallel.context=129 run.processes=129", "at most half", "got 129", "lower it"),
}


@pytest.mark.parametrize("case", LAYOUTS)
def test_a_layout_that_does_not_divide_is_refused(
    case: str, tiny: Path, tmp_path: Path, error_of: Callable[..., str]
) -> None:
    overrides, *words = LAYOUTS[case]
    for verb, config in (("sft", sft), ("rl", rl)):
        error = error_of(verb, config(tiny, tmp_path), *overrides.split())
        assert all(word in error for word in words) and ";" in error, error
        assert error.count("\n") == 1, "one line"
    assert not (tmp_path / "run").exists(), "a refused run leaves nothing"


def test_float32_is_refused_on_gpus(tiny: Path, tmp_path: Path, error_of: Callable[..., str]) -> None:
    error = error_of("sft", sft(tiny, tmp_path), "--dry-run", "run.platform=cuda", "model.dtype=float32")
    assert "needs model.dtype=bfloat16, got float32" in error and "set model.dtype" in error


def test_a_microbatch_must_hold_the_longest_sample_as_context_ranks_pad_it(
    tiny: Path, tmp_path: Path, error_of: Callable[..., str]
) -> None:
    layout = ["run.processes=2", "parallel.context=2"]
    error = error_of("sft", sft(tiny, tmp_path), "context_length=255", "data.microbatch_tokens=255", *layout)
    assert "data.microbatch_tokens must hold" in error and "padded to 256" in error and "raise it" in error
    error = error_of("rl", rl(tiny, tmp_path), "orchestrator.microbatch_tokens=255")
    assert "orchestrator.microbatch_tokens must hold" in error and "context of 256" in error


def changed_model(tiny: Path, tmp_path: Path, **settings: Any) -> Path:
    """The tiny model with other values in config.json; its weights stay."""
    model = tmp_path / "changed"
    shutil.copytree(tiny / "model", model, dirs_exist_ok=True)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | settings))
    return model


@pytest.mark.parametrize("verb", ["sft", "rl"])
def test_a_checkpoint_of_another_model_is_refused(
    verb: str, tiny: Path, tmp_path: Path, error_of: Callable[..., str]
) -> None:
    config = (sft if verb == "sft" else rl)(tiny, tmp_path)
    checkpoint = write_checkpoint(tmp_path / "run", changed_model(tiny, tmp_path, hidden_size=64), step=4)
    for override, words in (
        ("run.seed=1", ("hidden_size 64 there, 128 here", "restore model.path", "another run folder")),
        ("model.dtype=bfloat16", ("dtype float32 there, bfloat16 here", "model.dtype")),
    ):
        error = error_of(verb, config, override)
        assert str(checkpoint) in error and all(word in error for word in words) and error.count("\n") == 1, error


def test_a_checkpoint_of_another_family_is_refused(tiny: Path, tmp_path: Path, error_of: Callable[..., str]) -> None:
    glm = {"architectures": ["Glm4MoeForCausalLM"], "n_routed_experts": 8, "n_shared_experts": 1}
    write_checkpoint(tmp_path / "run", changed_model(tiny, tmp_path, **glm), step=4)
    error = error_of("sft", sft(tiny, tmp_path))
    assert "architecture Glm4MoeForCausalLM there, Qwen3MoeForCausalLM here" in error


def test_resuming_with_another_tokenizer_is_refused(tiny: Path, tmp_path: Path, error_of: Callable[..., str]) -> None:
    write_checkpoint(tmp_path / "run", tiny / "model", step=4)
    model = changed_model(tiny, tmp_path)
    tree = json.loads((model / "tokenizer.json").read_text())
    tree["added_tokens"][-1]["content"] = "</thought>"
    (model / "tokenizer.json").write_text(json.dumps(tree))
    error = error_of("sft", sft(tiny, tmp_path), f"model.path={model}")
    assert "must be resumed with the tokenizer" in error and "tokenizer.json" in error and "restore" in error


def test_a_damaged_checkpoint_is_refused_and_named(tiny: Path, tmp_path: Path, error_of: Callable[..., str]) -> None:
    checkpoint = write_checkpoint(tmp_path / "run", tiny / "model", step=4)
    (checkpoint / "meta.json").write_text("{")
    assert f"checkpoint {checkpoint} must be whole" in error_of("sft", sft(tiny, tmp_path))


def test_a_disk_without_room_for_a_checkpoint_is_refused(
    tiny: Path, tmp_path: Path, error_of: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda _path: usage(2**30, 2**30, 2**20))
    for verb, config in (("sft", sft), ("rl", rl)):
        error = error_of(verb, config(tiny, tmp_path))
        assert "run.dir" in error and "room for 3 checkpoints" in error and "0.000977 GiB free" in error
        assert "choose another run.dir" in error


def test_a_read_only_run_folder_is_refused(tiny: Path, tmp_path: Path) -> None:
    """In a process of its own, without root's right to write everywhere."""
    (tmp_path / "run").mkdir(mode=0o555)
    command = [sys.executable, "-m", "megatron_rl.cli.main", "sft", sft(tiny, tmp_path)]
    if os.geteuid() == 0:
        command = ["setpriv", "--bounding-set", "-dac_override", "--inh-caps", "-all", *command]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "error: run.dir must be a folder that can be made and written" in done.stderr
    assert "Permission denied" in done.stderr and "change permissions" in done.stderr
