"""Runs of the real command in subprocesses, and a tiny model for them."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_rl.cli.tiny import make_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model with tokenizer and a few SFT rows."""
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny(folder, seed=0, num_train=64, num_heldout=8)
    return folder


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
