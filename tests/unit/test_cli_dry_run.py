"""--dry-run: a config is checked and counted for its cluster on a machine that has nothing of it."""

import itertools
import json
import re
import runpy
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_rl.cli.cluster import groups_across_nodes
from megatron_rl.cli.main import app
from megatron_rl.cli.tiny import make_tiny
from megatron_rl.distributed.config import ParallelConfig

ROOT = Path(__file__).parents[2]
RUN_FILES = [
    path for path in (ROOT / "examples").rglob("*.yaml") if not path.name.startswith(("distill_", "mergemix_"))
]
EXAMPLES = sorted(path.relative_to(ROOT) for path in RUN_FILES)
INPUT = runpy.run_path(str(Path(__file__).parents[1] / "cli_input.py"))
sft, rl = INPUT["sft"], INPUT["rl"]

Report = Callable[..., str]


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str]) -> Report:
    """Runs the command in this process and returns what it prints."""

    def run(*arguments: str) -> str:
        app([*arguments, "--dry-run"], standalone_mode=False)
        return capsys.readouterr().out

    return run


def total_of(text: str) -> float:
    """The memory table's total."""
    match = re.search(r"^ +total +([\d.]+)$", text, re.MULTILINE)
    assert match, text
    return float(match[1])


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_every_example_passes_as_it_is_shipped(
    example: Path, tiny: Path, tmp_path: Path, report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    shutil.copytree(tiny, tmp_path / "runs" / "tiny")
    shutil.copytree(tiny / "model", tmp_path / "runs" / "tiny-sft" / "hf")
    shutil.copytree(tiny / "model", tmp_path / "runs" / "regularisers" / "start" / "sft" / "hf")
    if "glm" in example.name:
        make_tiny(tmp_path / "runs" / "tiny-glm", num_train=8, num_heldout=2, family="glm4_moe")
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    documented = re.search(r"--dry-run (--gpu-memory \d+)", example.read_text())
    is_gpu = "platform: cuda" in example.read_text()
    assert bool(documented) == is_gpu, "examples for GPUs say in their head for how large ones"
    verb = "rl" if "environments:" in example.read_text() else "sft"
    text = report(verb, str(example), *(documented[1].split() if documented else []))
    assert "the config fits; nothing was started" in text
    assert ("not checked: GPUs" in text) == ("not checked: weights" in text) == is_gpu
    assert sorted(tmp_path.rglob("*")) == before, "a dry run writes nothing"


def test_what_is_there_is_counted_and_what_is_not_is_named(tiny: Path, tmp_path: Path, report: Report) -> None:
    data = {"train": [str(tiny / "train.jsonl")], "samples_per_step": 4, "mask": {"wrong_tool_calls": "train"}}
    config = sft(tiny, tmp_path, data=data)
    text = report("sft", config, "trainer.steps=5")
    assert "8 conversations, " in text and "4 conversations, at most 1,024 tokens" in text
    assert "2.0 steps per pass; 5 steps are 2.50 passes" in text
    assert text.count("not checked") == 1 and "not checked: run.dir" in text

    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(tiny / "model" / "config.json", bare)
    rows = tmp_path / "rows.jsonl"
    text = report("sft", config, f"model.path={bare}", f"data.heldout=[{rows}]")
    for words in ("weights: none in", "tokenizer and chat template: none", "without a tokenizer", f"no {rows} here"):
        assert f"not checked: {words}" in text or words in text, text
    assert "2.0 steps per pass" in text, "rows are counted without a tokenizer too"

    text = report("rl", rl(tiny, tmp_path), "engine.urls=[http://127.0.0.1:1, http://127.0.0.1:2]")
    assert "not checked: engines: http://127.0.0.1:1 and 1 more of 2 engine.urls do not answer from here" in text
    assert "16 groups of 8: 128 rollouts, 64 per engine" in text and "at most 32,768 tokens" in text


def test_what_is_there_is_checked_like_at_the_start(tiny: Path, tmp_path: Path, error_of: Callable[..., str]) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(tiny / "model" / "config.json", bare)
    (tmp_path / "rows.jsonl").write_text('{"messages": [\n')
    config = sft(tiny, tmp_path, data={"train": [str(tmp_path / "rows.jsonl")]})
    assert "rows.jsonl:1" in error_of("sft", config, "--dry-run", f"model.path={bare}")
    (bare / "model.safetensors").write_bytes(b"")
    assert "whole safetensors file" in error_of("sft", config, "--dry-run", f"model.path={bare}")
    (tmp_path / "run").write_text("")
    assert "run.dir" in error_of("rl", rl(tiny, tmp_path), "--dry-run")
    assert "did you mean baker" in error_of("rl", rl(tiny, tmp_path, environments=[{"name": "bakker"}]), "--dry-run")
    assert "num_experts must" in error_of(
        "sft", sft(tiny, tmp_path), "--dry-run", "parallel.expert=3", "run.processes=3"
    )


def test_a_model_that_does_not_fit_its_gpus_is_refused_with_cures(
    report: Report, error_of: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    config = "examples/sft/qwen3_30b_a3b_1node.yaml"
    total = total_of(report("sft", config))
    assert total_of(report("sft", config, "--gpu-memory", str(total + 1))) == total
    error = error_of("sft", config, "--dry-run", "--gpu-memory", str(total - 1), "model.recompute=selective")
    assert "a rank must fit" in error and "gradients (float32) 15.0" in error
    for cure in ("parallel.tensor", "parallel.pipeline", "parallel.expert", "model.recompute=full", "microbatch"):
        assert cure in error


def rows_of(text: str) -> dict[str, float]:
    """The memory table."""
    return {name: float(size) for name, size in re.findall(r"^ {14}(\S.*?) +([\d.]+)$", text, re.MULTILINE)}


@pytest.mark.parametrize("tokens", [8192, 16384, 65536])
def test_an_offloaded_reference_counts_only_for_what_it_takes_beyond_a_steps_activations_and_head(
    tokens: int, report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It visits the device between steps; held there it counts whole. The table rounds to 0.01 GiB."""
    monkeypatch.chdir(ROOT)
    run = ("examples/rl/qwen3_30b_a3b_1node.yaml", f"orchestrator.microbatch_tokens={tokens}")
    alone = rows_of(report("rl", *run))
    held = rows_of(report("rl", *run, "trainer.reference={}"))
    offloaded = rows_of(report("rl", *run, "trainer.reference={offload: true}"))
    parameters = alone["parameters (bfloat16)"]
    beyond = max(0.0, parameters - alone["activations (recompute full)"] - alone.get("head", 0.0))
    assert held["total"] - alone["total"] == pytest.approx(parameters, abs=0.02)
    assert offloaded["total"] - alone["total"] == pytest.approx(beyond, abs=0.02)
    assert offloaded.get("reference policy while it scores", 0.0) == pytest.approx(beyond, abs=0.02)
    assert (beyond == 0) == (tokens == 65536), "a large microbatch leaves more room than it needs"


def test_engines_that_do_not_fit_are_refused(error_of: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    one, four = "examples/rl/qwen3_30b_a3b_1node.yaml", "examples/rl/qwen3_30b_a3b_4nodes.yaml"
    error = error_of("rl", four, "--dry-run", "--gpu-memory", "62")
    assert "room for one rollout" in error and "raise it or shorten the context" in error
    assert "run.processes=6 and engine.count=3" in error_of("rl", one, "--dry-run", "engine.count=3")
    assert "8 of engine.urls on node-2" in error_of("rl", four, "--dry-run", "--gpus-per-node", "4", "run.processes=16")
    sft_four = "examples/sft/qwen3_30b_a3b_4nodes.yaml"
    assert "ranks must fill their nodes" in error_of("sft", sft_four, "--dry-run", "--gpus-per-node", "6")


def test_options_of_a_dry_run_without_effect_are_refused(
    tiny: Path, tmp_path: Path, error_of: Callable[..., str]
) -> None:
    for verb, config in (("sft", sft(tiny, tmp_path)), ("rl", rl(tiny, tmp_path))):
        for option in (("--gpu-memory", "80"), ("--gpus-per-node", "4")):
            assert f"{option[0]} has no effect without --dry-run" in error_of(verb, config, *option)
        assert "no effect with run.platform cpu" in error_of(verb, config, "--dry-run", "--gpu-memory", "80")


def test_tensor_parallel_groups_across_nodes_are_warned_of(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = "examples/sft/qwen3_30b_a3b_4nodes.yaml"
    assert "groups across nodes: data, expert data\n" in report("sft", config)
    text = report("sft", config, "--gpus-per-node", "2", "parallel.tensor=4", "parallel.expert=2")
    assert "tensor-parallel groups cross nodes" in text


@pytest.mark.parametrize("sizes", [(2, 2, 2, 2, 2), (4, 4, 1, 1, 2), (1, 3, 2, 1, 4), (3, 1, 1, 1, 2), (2, 4, 1, 3, 1)])
@pytest.mark.parametrize("gpus_per_node", [2, 3, 8])
def test_groups_across_nodes_are_those_of_the_ranks_one_by_one(sizes: tuple[int, ...], gpus_per_node: int) -> None:
    tensor, expert, expert_tensor, context, pipeline = sizes
    parallel = ParallelConfig(
        tensor=tensor, expert=expert, expert_tensor=expert_tensor, context=context, pipeline=pipeline
    )
    world_size = 48
    data = world_size // (tensor * context * pipeline)
    copies = world_size // (expert * expert_tensor * pipeline)
    expected = set()
    for names, lengths in (
        (("pipeline", "data", "context", "tensor"), (pipeline, data, context, tensor)),
        (("pipeline", "expert data", "expert", "expert_tensor"), (pipeline, copies, expert, expert_tensor)),
    ):
        nodes_of: dict[tuple, set[int]] = {}
        for rank, place in enumerate(itertools.product(*map(range, lengths))):
            for axis, name in enumerate(names):
                group = (name, *place[:axis], None, *place[axis + 1 :])
                nodes_of.setdefault(group, set()).add(rank // gpus_per_node)
        expected |= {group[0] for group, nodes in nodes_of.items() if len(nodes) > 1}
    assert set(groups_across_nodes(parallel, world_size, gpus_per_node)) == expected


def test_the_report_in_the_docs_is_what_it_prints(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    page = (ROOT / "docs" / "clusters.md").read_text()
    block = r"^    megatron-rl (sft .*--dry-run.*)\n(?s:.*?)```\n(?s:(.*?))```"
    command, shown = re.findall(block, page, re.MULTILINE)[0]
    printed = report(*command.replace(" --dry-run", "").split()).splitlines()
    lines = [line for line in shown.splitlines() if line != "..."]
    assert len(lines) > 10 and [line for line in printed if line in lines] == lines


def test_the_example_model_is_what_its_makers_published() -> None:
    config = json.loads((ROOT / "examples/models/Qwen3-30B-A3B/config.json").read_text())
    heads = (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"])
    assert heads == (32, 4, 128) and config["num_experts"] == 128 and config["num_experts_per_tok"] == 8
