"""Bad input to the real commands: one clear error, exit status 2, and no process was started."""

import json
import os
import runpy
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.cli import launch, preflight
from megatron_rl.cli.main import app
from megatron_rl.cli.user_errors import run_with_user_errors
from megatron_rl.config import ConfigError

INPUT = runpy.run_path(str(Path(__file__).parents[1] / "cli_input.py"))
sft, rl, write_checkpoint = INPUT["sft"], INPUT["rl"], INPUT["write_checkpoint"]


def rows_file(tmp_path: Path, *rows: Any) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


GOOD = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


def test_an_unknown_key_gets_the_nearest_name(tiny: Path, tmp_path: Path, error_of: Callable[..., str]) -> None:
    error = error_of("rl", rl(tiny, tmp_path), "loss.policy.eps_hihg=0.3")
    assert "eps_hihg" in error and "eps_high" in error
    assert "did you mean loss.policy.eps_high?" in error_of("rl", rl(tiny, tmp_path), "loss.eps_high=0.3")
    assert "did you mean cispo?" in error_of("rl", rl(tiny, tmp_path), "loss.policy.kind=cispa")


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


def test_a_run_folder_that_cannot_be_written_is_refused(
    tiny: Path, tmp_path: Path, error_of: Callable[..., str]
) -> None:
    (tmp_path / "file").write_text("")
    assert "run.dir" in error_of("sft", sft(tiny, tmp_path), f"run.dir={tmp_path / 'file' / 'run'}")


def test_options_without_effect_are_refused(tiny: Path, tmp_path: Path, error_of: Callable[..., str]) -> None:
    refused = {
        "trainer.optimizer.final_lr_fraction": ("sft", ["trainer.optimizer.final_lr_fraction=0.5"]),
        "trainer.heldout_every_steps": ("sft", ["trainer.heldout_every_steps=7"]),
        "engine.count": ("rl", ["engine.count=2", "engine.urls=[http://127.0.0.1:1]"]),
        "engine.port": ("rl", ["engine.port=7", "engine.urls=[http://127.0.0.1:1]"]),
        "engine.gpu_memory_share": ("rl", ["engine.gpu_memory_share=0.5"]),
        "engine.kv_cache_gib": ("rl", ["engine.kv_cache_gib=2", "run.platform=cuda"]),
        "run.threads": ("rl", ["run.threads=2", "run.platform=cuda"]),
        "loss.regulariser_tokens": ("rl", ["loss.regulariser_tokens=kept", "loss.tau=0"]),
    }
    for key, (verb, overrides) in refused.items():
        config = (sft if verb == "sft" else rl)(tiny, tmp_path)
        error = error_of(verb, config, *overrides)
        assert key.rsplit(".")[-1] in error and "no effect" in error, error
    assert "group_size" in error_of("rl", rl(tiny, tmp_path), "rollout.group_size=1")


def broken_model(tiny: Path, tmp_path: Path, name: str, data: bytes | None) -> str:
    """A copy of the tiny model with a file of these bytes, or without it."""
    model = tmp_path / "broken"
    shutil.rmtree(model, ignore_errors=True)
    shutil.copytree(tiny / "model", model)
    if data is None:
        (model / name).unlink()
    else:
        (model / name).write_bytes(data)
    return f"model.path={model}"


def test_a_damaged_model_folder_is_refused_naming_the_file(
    tiny: Path, tmp_path: Path, error_of: Callable[..., str]
) -> None:
    config = json.loads((tiny / "model" / "config.json").read_text())
    whole = (tiny / "model" / "model.safetensors").read_bytes()
    for name, data, words in (
        ("model.safetensors", whole[:-1], "whole safetensors file"),
        ("model.safetensors", b"version https://git-lfs.github.com/spec/v1", "whole safetensors file"),
        ("model.safetensors", b"", "0 bytes"),
        ("model.safetensors.index.json", b"{", "must be a JSON object"),
        ("model.safetensors.index.json", b"{}", "weight_map"),
        ("model.safetensors.index.json", b'{"weight_map": {"a": 1}}', "weight_map"),
        ("model.safetensors.index.json", b'{"weight_map": {"a": "model-2.safetensors"}}', "model-2.safetensors"),
        ("config.json", b"\xff", "must be JSON"),
        ("config.json", json.dumps(config | {"hidden_size": "128"}).encode(), "hidden_size"),
        ("config.json", json.dumps(config | {"num_experts_per_tok": 9}).encode(), "num_experts_per_tok"),
        ("generation_config.json", b"{", "must be JSON"),
        ("generation_config.json", b"[]", "JSON object"),
        ("generation_config.json", b'{"eos_token_id": "x"}', "eos_token_id"),
        ("chat_template.jinja", None, "chat template"),
        ("chat_template.jinja", b"{{ 1 / 0 }}", "division by zero"),
        ("tokenizer.json", None, "tokenizer"),
    ):
        assert words in error_of("sft", sft(tiny, tmp_path), broken_model(tiny, tmp_path, name, data)), name
    override = broken_model(tiny, tmp_path, "tokenizer.json", None)
    (tmp_path / "broken" / "tokenizer_config.json").unlink()
    assert "must hold a tokenizer" in error_of("rl", rl(tiny, tmp_path), override)


def test_addresses_that_cannot_serve_are_refused(tiny: Path, tmp_path: Path, error_of: Callable[..., str]) -> None:
    config = rl(tiny, tmp_path)
    for address in ("foo", "tcp://127.0.0.1", "tcp://127.0.0.1:0", "tcp://127.0.0.1:99999"):
        assert "tcp://HOST:PORT" in error_of("rl", config, f"orchestrator.address={address}")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert str(port) in error_of("rl", config, f"orchestrator.address=tcp://127.0.0.1:{port}")
        assert "http://HOST:PORT" in error_of("rl", config, "engine.urls=[foo]")
    assert "does not answer" in error_of("rl", config, f"engine.urls=[http://127.0.0.1:{port}]")
    assert "loopback" in error_of("rl", config, "engine.host=nohost")


def test_numbers_that_train_nothing_are_refused(tiny: Path, tmp_path: Path, error_of: Callable[..., str]) -> None:
    for override in ("trainer.optimizer.lr=.inf", "rollout.temperature=.inf", "run.seed=-1", f"run.seed={2**32}"):
        assert override.split("=")[0] in error_of("rl", rl(tiny, tmp_path), override)


def test_an_engine_argument_that_is_set_anyway_is_refused(
    tiny: Path, tmp_path: Path, error_of: Callable[..., str]
) -> None:
    for argument in ("--port", "--max_num_seqs=3"):
        error = error_of("rl", rl(tiny, tmp_path), f"engine.vllm_args=[{argument}]")
        assert argument.split("=")[0].replace("_", "-") in error
    assert "512" in error_of("rl", rl(tiny, tmp_path), "engine.max_model_len=1024")


def test_a_machine_without_gpus_refuses_cuda(
    tiny: Path, tmp_path: Path, error_of: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    for verb, config in (("sft", sft), ("rl", rl)):
        assert "one GPU per local rank" in error_of(verb, config(tiny, tmp_path), "run.platform=cuda")


ENVIRONMENT = """
from megatron_rl.config import ConfigModel
from megatron_rl.records import Prompt

class Broken:
    class Options(ConfigModel):
        fails: str

    splits = ("train", "heldout")

    def __init__(self, options, *, name):
        self.name, self.fails = name, options.fails
        self.reach("init")

    def reach(self, place):
        if self.fails == place:
            raise RuntimeError(f"{place} breaks")

    def size(self, split):
        self.reach("size")

    def prompt(self, split, index):
        self.reach(split)
        return "no prompt" if self.fails == "type" else Prompt(
            prompt_id=f"{split}/{index}", environment=self.name, messages=[{"role": "user", "content": "7" * 300}]
        )
"""


def test_a_broken_environment_is_refused_naming_what_it_raised(
    tiny: Path, tmp_path: Path, error_of: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_environment.py").write_text(ENVIRONMENT)
    (tmp_path / "broken_module.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    for place in ("init", "size", "train", "heldout"):
        made = {"name": "broken_environment:Broken", "options": {"fails": place}}
        error = error_of("rl", rl(tiny, tmp_path, environments=[made]))
        assert f"{place} breaks" in error and "broken_environment.py" in error
    for place, words in (("type", "got str"), ("nowhere", "leave room to answer")):
        made = {"name": "broken_environment:Broken", "options": {"fails": place}}
        assert words in error_of("rl", rl(tiny, tmp_path, environments=[made]))
    error = error_of("rl", rl(tiny, tmp_path, environments=[{"name": "broken_module:X"}]))
    assert "broken_module.py:1" in error and "division by zero" in error


def test_rows_that_no_template_can_render_are_named(tiny: Path, tmp_path: Path, error_of: Callable[..., str]) -> None:
    for arguments in ("{", "[1]", "[" * 100_000):
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        path = rows_file(tmp_path, GOOD, {"messages": turns})
        error = error_of("sft", sft(tiny, tmp_path, data={"train": [path]}))
        assert f"{path}:2" in error and "arguments" in error and len(error) < 1000


def run_folder(tmp_path: Path, config: str, *, model: Path | None = None, step: int = 4) -> Path:
    """A run folder as a run of this config leaves it; with a model, one checkpoint of it and exported weights too."""
    folder = tmp_path / "run"
    folder.mkdir()
    shutil.copy(config, folder / "config.yaml")
    (folder / "metrics.jsonl").write_text('{"step": 1, "phase": "sft", "time": 1, "loss/sft": 1}\n{"torn')
    if model is not None:
        write_checkpoint(folder, model, step=step)
        (folder / "hf").mkdir()
    return folder


def test_a_run_folder_of_the_other_kind_is_refused(tiny: Path, tmp_path: Path, error_of: Callable[..., str]) -> None:
    folder = run_folder(tmp_path, sft(tiny, tmp_path))
    before = (folder / "config.yaml").read_bytes()
    assert "of an SFT run" in error_of("rl", rl(tiny, tmp_path))
    assert (folder / "config.yaml").read_bytes() == before, "a refused run changes nothing"
    shutil.copy(rl(tiny, tmp_path), folder / "config.yaml")
    assert "of an RL run" in error_of("sft", sft(tiny, tmp_path))


def test_damaged_metrics_stop_a_resumed_run_at_once(tiny: Path, tmp_path: Path, error_of: Callable[..., str]) -> None:
    folder = run_folder(tmp_path, sft(tiny, tmp_path))
    (folder / "metrics.jsonl").write_text("garbage\n")
    assert f"{folder / 'metrics.jsonl'}:1" in error_of("sft", sft(tiny, tmp_path))


def test_a_complete_run_says_so_and_starts_nothing(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[list[str]] = []

    class Starts:
        def __init__(self, parts: Any, **_: Any) -> None:
            started.append([part.name for part in parts])

        def run(self) -> None:
            pass

    monkeypatch.setattr(launch, "Supervisor", Starts)
    config = sft(tiny, tmp_path)
    folder = run_folder(tmp_path, config, model=tiny / "model", step=4)

    def run(*overrides: str) -> str:
        started.clear()
        assert run_with_user_errors(lambda: app(["sft", config, *overrides], standalone_mode=False)) == 0
        return capsys.readouterr().out

    for steps in (3, 4):
        assert "is complete" in run(f"trainer.steps={steps}") and not started
    assert "is complete" not in run("trainer.steps=5") and started == [["trainer"]]
    os.utime(folder / "hf", (1, 1))
    assert "is complete" not in run("trainer.steps=4") and started, "weights older than the checkpoint are written anew"
    (folder / "config.yaml").write_text("a: [")
    assert "resuming" in run("trainer.steps=5") and started, "a damaged record of the last start stops nothing"


def test_engines_that_run_already_are_not_started_again(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error_of: Callable[..., str]
) -> None:
    started: list[str] = []

    class Starts:
        def __init__(self, parts: Any, **_: Any) -> None:
            started.extend(part.name for part in parts)

        def run(self) -> None:
            raise ConfigError("stop here")

    monkeypatch.setattr(launch, "Supervisor", Starts)
    monkeypatch.setattr(preflight, "answers", lambda _url: True)
    url = "engine.urls=[http://127.0.0.1:8000]"
    error_of("rl", rl(tiny, tmp_path), url)
    assert started == ["orchestrator", "trainer"]
    assert "engine.urls" in error_of("eval", rl(tiny, tmp_path), "--out", str(tmp_path / "out"), url)


def test_a_conversion_never_writes_over_anything(tiny: Path, tmp_path: Path, error_of: Callable[..., str]) -> None:
    before = sorted(path.name for path in (tiny / "model").iterdir())
    assert "choose another" in error_of("convert", str(tiny / "model"), str(tiny / "model"))
    assert "choose another" in error_of("convert", str(tiny / "model"), str(tiny / "train.jsonl"))
    assert sorted(path.name for path in (tiny / "model").iterdir()) == before


def test_a_place_that_cannot_be_written_is_refused(tiny: Path, tmp_path: Path, error_of: Callable[..., str]) -> None:
    file = tmp_path / "file"
    file.write_text("")
    assert "--folder" in error_of("quickstart", "--folder", str(file))
    (tmp_path / "quick" / "tiny").mkdir(parents=True)
    (tmp_path / "quick" / "tiny" / "done").write_text("3\n")
    assert "--seed must be 3" in error_of("quickstart", "--folder", str(tmp_path / "quick"), "--seed", "4")
    assert "FOLDER" in error_of("make-tiny", str(file))
    assert "--out" in error_of("eval", rl(tiny, tmp_path), "--out", str(file))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "phase": "sft", "time": 1, "loss/sft": "odd"}\n')
    assert "--out" in error_of("report", str(tmp_path), "--out", str(tmp_path))
    assert "--out" in error_of("report", str(tmp_path), "--out", str(file / "page.html"))
    (tmp_path / "summary.json").write_text('[{"name": 1, "split": "a", "rate": "x", "low": 1, "high": 2, "n": 3}]')
    assert "summary.json" in error_of("report", str(tmp_path))
