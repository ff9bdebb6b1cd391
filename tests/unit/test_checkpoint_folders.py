"""Checkpoint folders: which are kept, what a killed save leaves, whether a run fits what it would resume from."""

import errno
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from megatron_rl.checkpoint.config import CheckpointConfig
from megatron_rl.checkpoint.folders import (
    begin_folder,
    checkpoints,
    complete_folder,
    latest_checkpoint,
    new_folder,
    partial_folder,
    remove_leftovers,
    remove_old,
    step_folder,
)
from megatron_rl.checkpoint.identity import (
    check_disk_space,
    check_resumable,
    checkpoint_bytes,
    describe_model,
    describe_tokenizer,
    num_parameters,
)
from megatron_rl.config import ConfigError, DataError, RunError

QWEN: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 64,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
    "norm_topk_prob": True,
}


def save(folder: Path, step: int) -> Path:
    """A checkpoint that is nothing but complete."""
    target = step_folder(folder, step)
    begin_folder(target)
    (partial_folder(target) / "meta.json").write_text("{}")
    complete_folder(target)
    return target


def test_the_newest_are_kept_and_every_nth_for_ever(tmp_path: Path) -> None:
    config = CheckpointConfig(every_steps=2, keep_last=2, keep_every_steps=6)
    for step in range(2, 20, 2):
        save(tmp_path, step)
        remove_old(tmp_path, config)
    assert [path.name for path in checkpoints(tmp_path)] == [f"step_{step:06}" for step in (6, 12, 16, 18)]
    assert len(list(tmp_path.iterdir())) == 4


def test_what_a_killed_save_has_left_is_no_checkpoint_and_goes_with_the_next(tmp_path: Path) -> None:
    newest = save(tmp_path, 2)
    begin_folder(step_folder(tmp_path, 4))
    (partial_folder(step_folder(tmp_path, 4)) / "meta.json").write_text("{}")
    save(tmp_path, 1).rename(tmp_path / "step_000001.old")
    assert latest_checkpoint(tmp_path) == newest
    remove_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == [newest]


def test_a_folder_that_the_disk_does_not_take_is_named_and_the_old_one_stays(tmp_path: Path) -> None:
    target = tmp_path / "hf"
    with new_folder(target) as partial:
        (partial / "weights").write_text("old")
    with (
        pytest.raises(RunError, match=f"{target} must be written whole, got: No space left on device; make room"),
        new_folder(target) as partial,
    ):
        (partial / "weights").write_text("ne")
        raise OSError(errno.ENOSPC, "No space left on device")
    assert (target / "weights").read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_what_an_error_interrupts_is_removed_and_the_error_kept(tmp_path: Path) -> None:
    """Such as NaN in the last of many files; torch's CheckpointException is no Exception."""
    for error in (DataError("weights must be numbers"), CheckpointException("failed", {})):
        with pytest.raises(type(error)), new_folder(tmp_path / "hf") as partial:
            (partial / "weights").write_text("half")
            raise error
        assert list(tmp_path.iterdir()) == []


def test_steps_that_are_kept_must_be_saved(tmp_path: Path) -> None:
    for kept, nearest in ((250, 240), (90, 80), (7, 40), (60, 80)):
        with pytest.raises(ValueError, match=f"multiple of every_steps, got {kept} .* 40 steps; {nearest} is the"):
            CheckpointConfig(every_steps=40, keep_every_steps=kept)
    assert CheckpointConfig(every_steps=40, keep_every_steps=240).keep_every_steps == 240


def tokenizer(folder: Path, **settings: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>", "chat_template": "x", **settings}))
    return folder


def test_only_what_decides_about_tokens_makes_a_tokenizer_another(tmp_path: Path) -> None:
    same = describe_tokenizer(tokenizer(tmp_path / "same"))
    assert describe_tokenizer(tokenizer(tmp_path / "newer", transformers_version="9")) == same
    for name, settings in {"end": {"eos_token": "</s>"}, "template": {"chat_template": "y"}}.items():
        assert describe_tokenizer(tokenizer(tmp_path / name, **settings)) != same
    (tmp_path / "same" / "tokenizer.json").write_text("[]")
    assert describe_tokenizer(tmp_path / "same") != same


def test_a_run_is_refused_that_does_not_fit_its_newest_checkpoint(tmp_path: Path) -> None:
    """Before anything starts, naming what differs; a checkpoint without a tokenizer on record fits any."""
    model_path = tokenizer(tmp_path / "model")
    check_resumable(tmp_path, model_path, QWEN, "float32", platform="cpu")
    saved = save(tmp_path / "checkpoints", 4)
    meta = {"model": describe_model(QWEN, "float32"), "tokenizer": describe_tokenizer(model_path)}
    (saved / "meta.json").write_text(json.dumps(meta))
    check_resumable(tmp_path, model_path, QWEN, "float32", platform="cpu")
    with pytest.raises(ConfigError, match="dtype float32 there, bfloat16 here"):
        check_resumable(tmp_path, model_path, QWEN, "bfloat16", platform="cpu")
    with pytest.raises(ConfigError, match="num_layers 2 there, 3 here"):
        check_resumable(tmp_path, model_path, {**QWEN, "num_hidden_layers": 3}, "float32", platform="cpu")
    with pytest.raises(ConfigError, match=r"rotary_base 10000\.0 there, 500000\.0 here"):
        check_resumable(tmp_path, model_path, {**QWEN, "rope_theta": 5e5}, "float32", platform="cpu")
    other = tokenizer(tmp_path / "other", eos_token="</s>")
    with pytest.raises(ConfigError, match=r"step_000004 must be .* tokenizer_config.json"):
        check_resumable(tmp_path, other, QWEN, "float32", platform="cpu")
    (saved / "meta.json").write_text(json.dumps({"model": meta["model"]}))
    check_resumable(tmp_path, other, QWEN, "float32", platform="cpu")


def test_a_checkpoint_of_another_platform_is_refused_with_the_way_on(tmp_path: Path) -> None:
    """One that does not say its platform fits any."""
    model_path, saved = tokenizer(tmp_path / "model"), save(tmp_path / "checkpoints", 4)
    meta = {"model": describe_model(QWEN, "float32")}
    (saved / "meta.json").write_text(json.dumps(meta))
    check_resumable(tmp_path, model_path, QWEN, "float32", platform="cpu")
    (saved / "meta.json").write_text(json.dumps({**meta, "platform": "cuda"}))
    check_resumable(tmp_path, model_path, QWEN, "float32", platform="cuda")
    with pytest.raises(ConfigError, match=f"{saved} .*got cpu, .*saved on cuda.*; convert it to a Hugging Face folder"):
        check_resumable(tmp_path, model_path, QWEN, "float32", platform="cpu")


def test_a_run_needs_room_for_one_checkpoint_more_than_it_keeps_and_its_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = num_parameters(QWEN)
    assert checkpoint_bytes(QWEN, "float32") == 12 * count
    assert checkpoint_bytes(QWEN, "bfloat16") == 14 * count
    usage = SimpleNamespace(free=37 * count)
    monkeypatch.setattr("shutil.disk_usage", lambda _folder: usage)
    config = CheckpointConfig(keep_last=2)
    check_disk_space(tmp_path / "not" / "yet", QWEN, "float32", config=config, export=False)
    with pytest.raises(ConfigError, match=r"3 checkpoints of .*keep_last .*, and .* of exported weights, together"):
        check_disk_space(tmp_path, QWEN, "float32", config=config, export=True)
    usage.free = (3 * 12 + 5 * 4) * count
    check_disk_space(tmp_path, QWEN, "float32", config=config, export=False, references=2)
    usage.free -= 1
    with pytest.raises(ConfigError, match=r"and 5 reference policies of"):
        check_disk_space(tmp_path, QWEN, "float32", config=config, export=False, references=2)
    for num_saved, free in ((1, 24), (2, 12), (3, 12)):
        save(tmp_path / "checkpoints", num_saved)
        usage.free = free * count
        check_disk_space(tmp_path, QWEN, "float32", config=config, export=False)
        usage.free -= 1
        with pytest.raises(ConfigError, match="one more checkpoint" if num_saved > 1 else "2 checkpoints"):
            check_disk_space(tmp_path, QWEN, "float32", config=config, export=False)


def test_a_checkpoint_without_its_last_file_is_damaged_not_absent(tmp_path: Path) -> None:
    model_path, saved = tokenizer(tmp_path / "model"), save(tmp_path / "checkpoints", 4)
    (saved / "meta.json").unlink()
    with pytest.raises(ConfigError, match=r"step_000004 must be whole, .* meta\.json; move it away"):
        check_resumable(tmp_path, model_path, QWEN, "float32", platform="cpu")
