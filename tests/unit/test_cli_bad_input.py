"""Bad input to the real commands: one clear error, exit status 2, and no process was started."""

import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_rl.cli import launch
from megatron_rl.cli.main import app
from megatron_rl.cli.tiny import make_tiny
from megatron_rl.cli.user_errors import run_with_user_errors


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny(folder, seed=0, num_train=8, num_heldout=2)
    return folder


@pytest.fixture
def error_of(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs the command in this process and returns its error; starting any process fails the test."""

    def no_process(*_: Any, **__: Any) -> Any:
        raise AssertionError("a process was started before the input was checked")

    monkeypatch.setattr(launch, "Supervisor", no_process)

    def run(*arguments: str) -> str:
        status = run_with_user_errors(lambda: app(list(arguments), standalone_mode=False))
        error = capsys.readouterr().err
        assert status == 2 and error.count("error: ") == 1, error
        return error

    return run


def sft(tiny: Path, tmp_path: Path, **changes: Any) -> str:
    tree = {
        "run": {"dir": str(tmp_path / "run")},
        "model": {"path": str(tiny / "model")},
        "context_length": 256,
        "data": {"train": [str(tiny / "train.jsonl")]},
        **changes,
    }
    path = tmp_path / "sft.yaml"
    path.write_text(yaml.safe_dump(tree))
    return str(path)


def rl(tiny: Path, tmp_path: Path, **changes: Any) -> str:
    tree = {
        "run": {"dir": str(tmp_path / "run")},
        "model": {"path": str(tiny / "model")},
        "environments": [{"name": "baker"}],
        "rollout": {"context_length": 256},
        **changes,
    }
    path = tmp_path / "rl.yaml"
    path.write_text(yaml.safe_dump(tree))
    return str(path)


def rows_file(tmp_path: Path, *rows: Any) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


GOOD = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


def test_an_unknown_key_gets_the_nearest_name(tiny: Path, tmp_path: Path, error_of: Callable[..., str]) -> None:
    error = error_of("rl", rl(tiny, tmp_path), "loss.eps_hihg=0.3")
    assert "eps_hihg" in error and "eps_high" in error


def test_a_missing_checkpoint_is_named(tiny: Path, tmp_path: Path, error_of: Callable[..., str]) -> None:
    for verb, config in (("sft", sft), ("rl", rl)):
        error = error_of(verb, config(tiny, tmp_path), "model.path=no/such/model")
        assert "no/such/model" in error


def test_an_unsupported_architecture_lists_the_supported(
    tiny: Path, tmp_path: Path, error_of: Callable[..., str]
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny / "model", model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLM"]}))
    error = error_of("rl", rl(tiny, tmp_path), f"model.path={model}")
    assert "LlamaForCausalLM" in error and "Qwen3MoeForCausalLM" in error


def test_a_malformed_line_is_named_with_its_file(tiny: Path, tmp_path: Path, error_of: Callable[..., str]) -> None:
    path = rows_file(tmp_path, GOOD, '{"messages": [')
    assert f"{path}:2" in error_of("sft", sft(tiny, tmp_path, data={"train": [path]}))


def test_messages_without_an_assistant_turn_are_refused(
    tiny: Path, tmp_path: Path, error_of: Callable[..., str]
) -> None:
    path = rows_file(tmp_path, GOOD, GOOD, {"messages": [{"role": "user", "content": "a"}]})
    error = error_of("sft", sft(tiny, tmp_path, data={"train": [path]}))
    assert f"{path}:3" in error and "assistant" in error


def test_a_sample_longer_than_the_context_is_refused(tiny: Path, tmp_path: Path, error_of: Callable[..., str]) -> None:
    long = {"messages": [{"role": "user", "content": "7" * 300}, {"role": "assistant", "content": "b"}]}
    path = rows_file(tmp_path, GOOD, long)
    error = error_of("sft", sft(tiny, tmp_path, data={"train": [path]}))
    assert f"{path}:2" in error and "256" in error


def test_an_environment_that_does_not_exist_gets_the_nearest(
    tiny: Path, tmp_path: Path, error_of: Callable[..., str]
) -> None:
    error = error_of("rl", rl(tiny, tmp_path, environments=[{"name": "bakker"}]))
    assert "bakker" in error and "did you mean baker" in error


def test_a_port_in_use_is_refused(tiny: Path, tmp_path: Path, error_of: Callable[..., str]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert str(port) in error_of("rl", rl(tiny, tmp_path), f"engine.port={port}")


def test_a_context_beyond_the_model_is_refused(tiny: Path, tmp_path: Path, error_of: Callable[..., str]) -> None:
    assert "512" in error_of("rl", rl(tiny, tmp_path), "rollout.context_length=1024")


def test_a_layout_that_does_not_divide_is_refused(tiny: Path, tmp_path: Path, error_of: Callable[..., str]) -> None:
    assert "parallel.tensor" in error_of("sft", sft(tiny, tmp_path), "parallel.tensor=2")
    assert "heads" in error_of("sft", sft(tiny, tmp_path), "parallel.tensor=3", "run.processes=3")
    assert "parallel.expert" in error_of("sft", sft(tiny, tmp_path), "parallel.expert=2")


def test_a_run_folder_that_cannot_be_written_is_refused(
    tiny: Path, tmp_path: Path, error_of: Callable[..., str]
) -> None:
    (tmp_path / "file").write_text("")
    assert "run.dir" in error_of("sft", sft(tiny, tmp_path), f"run.dir={tmp_path / 'file' / 'run'}")


def test_options_without_effect_are_refused(tiny: Path, tmp_path: Path, error_of: Callable[..., str]) -> None:
    error = error_of("sft", sft(tiny, tmp_path), "trainer.optimizer.final_lr_fraction=0.5")
    assert "no effect" in error
    assert "group_size" in error_of("rl", rl(tiny, tmp_path), "rollout.group_size=1")
    assert "engine.count" in error_of("rl", rl(tiny, tmp_path), "engine.count=2", "engine.urls=[http://127.0.0.1:1]")
