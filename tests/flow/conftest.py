"""Runs of the real command in subprocesses, and a tiny model for them."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from megatron_rl.cli.tiny import make_tiny

SFT_STEPS = 36


@pytest.fixture(scope="session")
def sft_config(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    """Writes the config of a short SFT run into a folder: a tiny random model learns to answer in one or two words."""
    tiny = tmp_path_factory.mktemp("tiny")
    model = make_tiny(tiny, seed=0, num_train=8, num_heldout=2).model
    rows = tiny / "rows.jsonl"
    with rows.open("w") as stream:
        for index in range(64):
            answer = ["ja", "nein", "ja nein", "nein ja"][index * 7 % 4]
            turns = [{"role": "user", "content": f"Frage {index}"}, {"role": "assistant", "content": answer}]
            stream.write(json.dumps({"messages": turns}) + "\n")

    def write(folder: Path) -> Path:
        tree = {
            "run": {"dir": str(folder / "run"), "platform": "cpu"},
            "model": {"path": str(model), "dtype": "float32"},
            "context_length": 128,
            "data": {
                "train": [str(rows)],
                "heldout": [str(rows)],
                # Half of the rows are wrong calls; without them the model is too good for RL to have anything to do.
                "mask": {"wrong_tool_calls": "train"},
                "samples_per_step": 16,
                "microbatch_tokens": 256,
            },
            "trainer": {
                "steps": SFT_STEPS,
                "heldout_every_steps": 12,
                "optimizer": {"lr": 3e-3},
                "checkpoint": {"every_steps": 4},
            },
        }
        path = folder / "sft.yaml"
        path.write_text(yaml.safe_dump(tree))
        return path

    return write


@pytest.fixture(scope="session")
def sft_run(sft_config: Callable[[Path], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of an SFT run that went through."""
    folder = tmp_path_factory.mktemp("sft")
    run = Command(["sft", str(sft_config(folder))], folder / "output.txt")
    assert run.wait(240) == 0, run.text()
    return folder / "run"


class Command:
    """megatron-rl with arguments, its output in a file."""

    def __init__(self, arguments: list[str], output: Path) -> None:
        self.output = output
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
        with output.open("w") as stream:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "megatron_rl.cli.main", *arguments],
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def wait(self, timeout_s: float) -> int:
        """Exit status; the whole output is in the error if it takes longer."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            raise AssertionError(f"not done after {timeout_s} s; output:\n{self.text()}") from None

    def wait_for(self, condition: Callable[[], bool], timeout_s: float) -> None:
        """Returns when condition holds; fails if the command ends before or time is up."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, f"ended with {self.process.returncode}; output:\n{self.text()}"
            assert time.monotonic() < deadline, f"still waiting after {timeout_s} s; output:\n{self.text()}"
            time.sleep(0.1)

    def text(self) -> str:
        """Everything printed so far."""
        return self.output.read_text()


@pytest.fixture
def command(tmp_path: Path):
    """Starts megatron-rl; kills what a failing test leaves."""
    started: list[Command] = []

    def start(*arguments: str) -> Command:
        started.append(Command(list(arguments), tmp_path / f"output-{len(started)}.txt"))
        return started[-1]

    yield start
    for item in started:
        if item.process.poll() is None:
            os.killpg(item.process.pid, signal.SIGKILL)
