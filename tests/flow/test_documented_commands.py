"""Every command that README and docs show is run here, shortened by overrides, in the order a reader would take."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from megatron_rl.cli.main import app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").rglob("*.yaml"))]
SHORT_SFT = ["trainer.steps=250"]
SHORT_RL = ["trainer.steps=1", "orchestrator.groups_per_step=16", "orchestrator.evaluation.prompts_per_split=2"]
RUNS: dict[str, list[list[str]]] = {
    "megatron-rl make-tiny runs/tiny": [["make-tiny", "runs/tiny"]],
    "megatron-rl make-tiny runs/tiny-glm --family glm4_moe": [
        ["make-tiny", "runs/tiny-glm", "--family", "glm4_moe"],
    ],
    "megatron-rl make-tiny DIR": [["make-tiny", "runs/other"]],
    "megatron-rl config examples/rl/tiny_cpu.yaml": [["config", "examples/rl/tiny_cpu.yaml"]],
    "megatron-rl config CONFIG": [["config", "examples/sft/tiny_cpu.yaml"]],
    "megatron-rl sft examples/sft/tiny_cpu.yaml": [["sft", "examples/sft/tiny_cpu.yaml", *SHORT_SFT]],
    "megatron-rl sft examples/sft/tiny_glm_cpu.yaml": [["sft", "examples/sft/tiny_glm_cpu.yaml", "trainer.steps=4"]],
    "megatron-rl sft CONFIG [key=value ...]": [["sft", "examples/sft/tiny_cpu.yaml", *SHORT_SFT]],
    "megatron-rl eval CONFIG --out DIR": [
        ["eval", "examples/rl/tiny_cpu.yaml", "--out", "runs/eval", "orchestrator.evaluation.prompts_per_split=2"]
    ],
    "megatron-rl rl examples/rl/tiny_cpu.yaml": [["rl", "examples/rl/tiny_cpu.yaml", *SHORT_RL]],
    "megatron-rl rl CONFIG [key=value ...]": [],
    "megatron-rl sft CONFIG --dry-run": [],
    **{
        f"megatron-rl {kind} examples/{kind}/qwen3_30b_a3b_{nodes}.yaml --dry-run --gpu-memory {gib}": [
            [kind, f"examples/{kind}/qwen3_30b_a3b_{nodes}.yaml", "--dry-run", "--gpu-memory", gib]
        ]
        for kind, nodes, gib in (
            ("sft", "1node", "79"),
            ("sft", "4nodes", "79"),
            ("rl", "1node", "139"),
            ("rl", "4nodes", "79"),
        )
    },
    "megatron-rl report RUN": [["report", "runs/tiny-sft"]],
    "megatron-rl snr RUN": [["snr", "runs/tiny-rl"]],
    "megatron-rl report RUN [RUN ...]": [["report", "runs/tiny-sft", "runs/tiny-rl", "--out", "runs/both.html"]],
    "megatron-rl convert SOURCE TARGET": [["convert", "runs/tiny/model", "runs/converted"]],
    "megatron-rl convert RUN/checkpoints/step_000020 DIR --hf-source MODEL": [
        ["convert", "runs/tiny-sft/checkpoints/step_000250", "runs/back", "--hf-source", "runs/tiny/model"]
    ],
    **{
        f"megatron-rl {line}": [shlex.split(line)]
        for line in (
            "label runs/tiny/model runs/tiny/reasoning.jsonl --out runs/tiny/labelled --difficulty-column difficulty",
            "inspect runs/tiny/model runs/tiny/labelled/reasoning.jsonl runs/tiny/train.jsonl --rows 2",
            "inspect runs/tiny/model runs/tiny/train.jsonl --rows 20 --html runs/tiny/inspect.html",
            "pack --dry-run runs/tiny/train.jsonl --model runs/tiny/model --capacity 1024 --ranks 8",
            "pack --dry-run runs/tiny/train.jsonl --model runs/tiny/model --capacity 4096 --plot runs/pack.svg",
            "sft examples/sft/tiny_labelled_cpu.yaml --dry-run",
        )
    },
    **{
        f"megatron-rl {line}": [[*shlex.split(line), "trainer.steps=4"]]
        for line in (
            "sft examples/sft/tiny_labelled_cpu.yaml",
            "sft examples/sft/tiny_cpu.yaml model.path=runs/tiny-sft/hf run.dir=runs/tiny-a run.seed=1",
            "sft examples/sft/tiny_cpu.yaml model.path=runs/tiny-sft/hf run.dir=runs/tiny-b run.seed=2",
        )
    },
    **{
        f"megatron-rl {line}": [shlex.split(line)]
        for line in (
            "soup runs/tiny-a/hf runs/tiny-b/hf runs/tiny-soup",
            "soup runs/tiny-a/hf runs/tiny-b/hf runs/tiny-soup73 --weights .7,.3",
            "mergemix build examples/sft/mergemix_tiny.yaml",
        )
    },
    "megatron-rl soup SOURCE ... TARGET": [],
    "megatron-rl eval examples/rl/tiny_cpu.yaml --out runs/tiny-mix/eval/a1-b3 model.path=runs/tiny-mix/a1-b3": [
        [
            "eval",
            "examples/rl/tiny_cpu.yaml",
            *("--out", "runs/tiny-mix/eval/a1-b3"),
            "model.path=runs/tiny-mix/a1-b3",
            "orchestrator.evaluation.prompts_per_split=2",
        ]
    ],
    "megatron-rl mergemix rank examples/sft/mergemix_tiny.yaml": [
        ["mergemix", "rank", "examples/sft/mergemix_tiny.yaml"]
    ],
}
"""Documented command -> what is run for it; an empty list where another entry runs the same."""
COMMAND = re.compile(r"\b(?:megatron-rl|torchrun|make|sbatch|(?<!sbatch )examples/launch/\w+\.sh) [^#]*?(?=  |$)")
ELSEWHERE = {
    "make quickstart": "test_quickstart.py",
    "megatron-rl distill examples/sft/distill_prefill.yaml": "tests/engine/test_engine_distill.py",
    "megatron-rl distill examples/sft/distill_backfill.yaml": "tests/engine/test_engine_distill.py",
    "megatron-rl label MODEL DATA --grader GRADER.yaml --out DIR": "tests/unit/test_cli_label.py",
    "megatron-rl effort-template MODEL --out effort.jinja": "tests/unit/test_cli_label.py",
    "megatron-rl engine CONFIG --index N [key=value ...]": "test_launch_scripts.py",
    "megatron-rl orchestrator CONFIG [key=value ...]": "test_launch_scripts.py",
    "examples/launch/sft_torchrun.sh CONFIG [key=value ...]": "test_launch_scripts.py",
    "examples/launch/rl_torchrun.sh orchestrator CONFIG [key=value ...]": "test_launch_scripts.py",
    "examples/launch/rl_torchrun.sh engines CONFIG [key=value ...]": "test_launch_scripts.py",
    "examples/launch/rl_torchrun.sh trainer CONFIG [key=value ...]": "test_launch_scripts.py",
    "sbatch examples/launch/sft_slurm.sh CONFIG [key=value ...]": "test_launch_scripts.py",
    "sbatch examples/launch/rl_slurm.sh CONFIG [key=value ...]": "test_launch_scripts.py",
    "make test": "the project's CI",
    "make lint": "the project's CI",
    "make docs": "tests/unit/test_docs_reference.py",
    "make bench": "itself",
    "make test-all": "itself",
    "make setup": "the project's CI",
}


def documented_commands() -> set[str]:
    """Command lines of the pages: indented by four spaces, or behind `First:` and the like in the examples."""
    found = set()
    for page in PAGES:
        for line in page.read_text(encoding="utf-8").splitlines():
            if page.suffix == ".md" and not line.startswith("    "):
                continue
            for command in re.findall(COMMAND, line):
                found.add(command.strip().rstrip("."))
    return found


def test_every_documented_command_is_known_here() -> None:
    known = RUNS.keys() | ELSEWHERE.keys()
    unknown = {c for c in documented_commands() if c not in known and not c.startswith("torchrun ")}
    assert not unknown, f"documented but run by no test: {unknown}"
    gone = RUNS.keys() - documented_commands()
    assert not gone, f"documented nowhere, to be removed here: {gone}"
    verbs = {c.split()[1] for c in known if c.startswith("megatron-rl ")}
    assert verbs | {"quickstart"} == typer.main.get_command(app).commands.keys()  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_documented_commands_run(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    for runs in RUNS.values():
        for arguments in runs:
            done = subprocess.run(
                [sys.executable, "-m", "megatron_rl.cli.main", *arguments],
                cwd=tmp_path,
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, f"{shlex.join(arguments)}\n{done.stdout}\n{done.stderr}"
    rates = json.loads((tmp_path / "runs" / "eval" / "eval.json").read_text())
    assert {row["split"] for row in rates} == {"new_texts", "new_numbers"}
    assert "<html" in (tmp_path / "runs" / "both.html").read_text()
