"""A tiny model, and the command in this process with its error caught."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.cli.tiny import make_tiny
from megatron_rl.cli.user_errors import run_with_user_errors


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of make_tiny with few rows. Not to be written to."""
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny(folder, seed=0, num_train=8, num_heldout=4)
    return folder


@pytest.fixture(scope="module")
def world_of_one() -> Iterator[None]:
    """torch.distributed with this process as its only rank."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore

    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def error_of(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs the command in this process and returns its error; starting any process fails the test."""
    # Seconds of import that other unit tests need not wait for.
    from megatron_rl.cli import launch
    from megatron_rl.cli.main import app

    def no_process(*_: Any, **__: Any) -> Any:
        raise AssertionError("a process was started before the input was checked")

    monkeypatch.setattr(launch, "Supervisor", no_process)

    def run(*arguments: str) -> str:
        status = run_with_user_errors(lambda: app(list(arguments), standalone_mode=False))
        error = capsys.readouterr().err
        assert status == 2 and error.count("error: ") == 1, error
        return error

    return run
