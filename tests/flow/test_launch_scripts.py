"""The scripts of examples/launch on loopback: agents that meet as nodes do, and RL from its three roles."""

import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_rl.engine.server import free_port

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "examples" / "launch"
rl_config = runpy.run_path(str(Path(__file__).with_name("test_rl_flow.py")))["rl_config"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


class Script:
    """A script of examples/launch with its environment, output in a file."""

    def __init__(self, folder: Path, name: str, *arguments: str, **environment: str | int) -> None:
        self.output = folder / f"{name}-{time.monotonic_ns()}.txt"
        path = f"{Path(__file__).parent / 'fake_slurm'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        settings = {"PATH": path, "PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
        with self.output.open("w") as stream:
            self.process = subprocess.Popen(
                [str(LAUNCH / name), *arguments],
                env={**os.environ, **settings, **{key: str(value) for key, value in environment.items()}},
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self, timeout_s: float = 400) -> int:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not done after {timeout_s} s; output:\n{self.text()}") from None

    def text(self) -> str:
        return self.output.read_text()


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Callable[..., Script]]:
    """Starts scripts; ends what a failing test leaves."""
    started: list[Script] = []

    def start(name: str, *arguments: str, **environment: str | int) -> Script:
        started.append(Script(tmp_path, name, *arguments, **environment))
        return started[-1]

    yield start
    for item in started:
        with suppress(ProcessLookupError):
            os.killpg(item.process.pid, signal.SIGKILL)


def records(run_dir: Path) -> list[dict[str, Any]]:
    """Complete lines of metrics.jsonl."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def losses(run_dir: Path) -> list[tuple[int, float, float]]:
    return [(r["step"], r["loss/sft"], r["grad_norm"]) for r in records(run_dir) if "loss/sft" in r]


def slurm(**changes: str | int) -> dict[str, str | int]:
    """What sbatch would set on one node with two tasks."""
    job = {"SLURM_JOB_ID": free_port(), "SLURM_JOB_NODELIST": "localhost", "SLURM_NNODES": 1}
    return {**job, "SLURM_NTASKS": 2, "SLURM_NTASKS_PER_NODE": 2, **changes}


@pytest.fixture(scope="module")
def tiny_files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides that put the example on a small model and few rows."""
    folder = tmp_path_factory.mktemp("tiny")
    command = [sys.executable, "-m", "megatron_rl.cli.main", "make-tiny", str(folder)]
    subprocess.run(command, check=True, capture_output=True)
    return [
        f"model.path={folder / 'model'}",
        f"data.train=[{folder / 'heldout.jsonl'}]",
        "data.heldout=[]",
        "trainer.heldout_every_steps=50",
        "trainer.steps=4",
        "trainer.export=false",
    ]


def test_two_nodes_train_like_one_and_like_slurm(
    tiny_files: list[str], tmp_path: Path, script: Callable[..., Script]
) -> None:
    example = str(ROOT / "examples" / "sft" / "tiny_cpu.yaml")

    def run_dir(name: str) -> list[str]:
        return [example, *tiny_files, f"run.dir={tmp_path / name}"]

    one = script("sft_torchrun.sh", *run_dir("one"), RANKS_PER_NODE=2, HEAD_PORT=free_port())
    assert one.wait() == 0, one.text()
    port = free_port()
    agents = [
        script("sft_torchrun.sh", *run_dir("two"), NODES=2, NODE_RANK=rank, RANKS_PER_NODE=1, HEAD_PORT=port)
        for rank in (0, 1)
    ]
    for agent in agents:
        assert agent.wait() == 0, agent.text()
    tasks = script("sft_slurm.sh", *run_dir("slurm"), **slurm())
    assert tasks.wait() == 0, tasks.text()
    assert [step for step, *_ in losses(tmp_path / "one")] == [1, 2, 3, 4]
    assert losses(tmp_path / "two") == losses(tmp_path / "one")
    assert losses(tmp_path / "slurm") == losses(tmp_path / "one")
    for name in ("one", "two", "slurm"):
        recorded = yaml.safe_load((tmp_path / name / "config.yaml").read_text())
        assert recorded["run"]["processes"] == 2 and recorded["trainer"]["steps"] == 4


@pytest.mark.parametrize("name", ["sft_torchrun.sh", "sft_slurm.sh"])
def test_a_preempted_job_saves_and_its_next_start_goes_on(
    name: str, tiny_files: list[str], tmp_path: Path, script: Callable[..., Script]
) -> None:
    run_dir = tmp_path / "run"
    arguments = [str(ROOT / "examples" / "sft" / "tiny_cpu.yaml"), *tiny_files, f"run.dir={run_dir}"]
    environment = slurm() if "slurm" in name else {"RANKS_PER_NODE": 2, "HEAD_PORT": free_port()}
    first = script(name, *arguments, "trainer.steps=2000", **environment)
    while not any(record["step"] >= 3 for record in records(run_dir)):
        assert first.process.poll() is None, first.text()
        time.sleep(0.1)
    first.process.terminate()
    assert first.wait() != 0, "the job is not done"
    saved = max(int(path.name.removeprefix("step_")) for path in (run_dir / "checkpoints").glob("step_*[0-9]"))
    assert 3 <= saved == losses(run_dir)[-1][0] < 2000, "the last step is the saved one"
    second = script(name, *arguments, f"trainer.steps={saved + 2}", **environment)
    assert second.wait() == 0, second.text()
    assert [step for step, *_ in losses(run_dir)] == list(range(1, saved + 3)), "every step is recorded exactly once"


def rl_arguments(sft_run: Path, tmp_path: Path) -> list[str]:
    return [str(rl_config(sft_run / "hf", tmp_path)), "trainer.steps=2", "trainer.eval_every_steps=2"]


def assert_trained(run_dir: Path) -> None:
    assert [r["step"] for r in records(run_dir) if "loss/total" in r] == [1, 2]
    assert list((run_dir / "hf").glob("*.safetensors"))


def test_rl_runs_from_its_three_roles(sft_run: Path, tmp_path: Path, script: Callable[..., Script]) -> None:
    ports = [free_port() for _ in range(3)]
    arguments = rl_arguments(sft_run, tmp_path)
    arguments += [f"engine.urls=[http://127.0.0.1:{ports[0]}, http://127.0.0.1:{ports[1]}]"]
    arguments += [f"orchestrator.address=tcp://localhost:{ports[2]}"]
    engines = script("rl_torchrun.sh", "engines", *arguments, ENGINES=2)
    orchestrator = script("rl_torchrun.sh", "orchestrator", *arguments)
    trainer = script("rl_torchrun.sh", "trainer", *arguments, RANKS_PER_NODE=2, HEAD_PORT=free_port())
    assert trainer.wait() == 0, trainer.text() + orchestrator.text() + engines.text()
    assert orchestrator.wait(60) == 0, orchestrator.text()
    assert engines.process.poll() is None, "engines serve until they are ended"
    engines.process.terminate()
    assert engines.wait(60) == 143, engines.text()
    assert_trained(tmp_path / "run")


def test_rl_runs_as_a_slurm_job(sft_run: Path, tmp_path: Path, script: Callable[..., Script]) -> None:
    nodes = slurm(SLURM_JOB_NODELIST="localhost,127.0.0.1", SLURM_NNODES=2, SLURM_NTASKS_PER_NODE=1)
    job = script(
        "rl_slurm.sh",
        *rl_arguments(sft_run, tmp_path),
        **nodes,
        TRAINER_NODES=1,
        ENGINE_PORT=free_port(),
        ORCHESTRATOR_PORT=free_port(),
    )
    assert job.wait() == 0, job.text()
    assert_trained(tmp_path / "run")


@pytest.mark.parametrize("path", sorted(LAUNCH.glob("*.sh")), ids=lambda path: path.name)
def test_scripts_are_executable_and_say_how_they_are_called(path: Path) -> None:
    assert os.access(path, os.X_OK) and shutil.which("bash")
    subprocess.run(["bash", "-n", str(path)], check=True)
    if "torchrun" in path.name:
        done = subprocess.run([str(path)], capture_output=True, text=True, check=False)
        assert done.returncode == 2 and "usage: " in done.stderr
