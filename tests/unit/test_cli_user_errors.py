"""How a user's error leaves a process."""

import errno
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatron_rl.cli import tiny
from megatron_rl.cli.output_folder import writing
from megatron_rl.cli.user_errors import run_with_user_errors
from megatron_rl.config import ConfigError, RunError, RunStop


def test_an_error_of_any_rank_is_seen(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise ConfigError("needs one GPU per local rank")

    assert run_with_user_errors(fails) == 2
    assert capsys.readouterr().err == "error: needs one GPU per local rank\n"
    monkeypatch.setenv("RANK", "3")
    assert run_with_user_errors(fails) == 2
    assert capsys.readouterr().err == "rank 3: error: needs one GPU per local rank\n"


def test_a_stop_by_a_signal_is_said_once_and_is_no_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stops() -> None:
        raise RunStop("stopped by SIGTERM after step 7")

    assert run_with_user_errors(stops) == 143
    assert capsys.readouterr().err == "stopped by SIGTERM after step 7\n"
    monkeypatch.setenv("RANK", "3")
    assert run_with_user_errors(stops) == 143
    assert capsys.readouterr().err == ""


@contextmanager
def small_files(num_bytes: int) -> Iterator[None]:
    """This process cannot make a file larger than that, which stands for a disk without room."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("num_bytes", [1000, 20_000, 1_000_000], ids=["rows", "tokenizer", "weights"])
def test_a_tiny_model_that_does_not_fit_on_its_disk_is_one_line(
    num_bytes: int, tmp_path: Path, error_of: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python, tokenizers and safetensors each raise an error of their own."""
    monkeypatch.setattr(tiny, "_TOKENIZER_ROWS", 100)
    monkeypatch.setattr(tiny, "_ERROR_ROWS", 20)
    make_tiny = tiny.make_tiny
    monkeypatch.setattr(tiny, "make_tiny", lambda folder, **how: make_tiny(folder, num_train=8, num_heldout=2, **how))
    with small_files(num_bytes):
        error = error_of("make-tiny", str(tmp_path / "tiny"))
    assert error == (
        f"error: {tmp_path / 'tiny'} must be written whole, got: File too large; make room or change permissions "
        "there, then start again\n"
    )


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES])
def test_a_disk_that_refuses_is_one_line_where_the_file_is_known(
    number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*where: str) -> None:
        raise OSError(number, os.strerror(number), *where)

    assert run_with_user_errors(lambda: fails("runs/page.html")) == 2
    assert capsys.readouterr().err == (
        f"error: runs/page.html must be a file that can be used here, got: {os.strerror(number)}; "
        "make room or change permissions there\n"
    )
    with pytest.raises(OSError, match=os.strerror(number)):
        run_with_user_errors(fails)
    for error in (OSError(number, "of Python"), Exception(f"of Rust (os error {number})")):
        with pytest.raises(RunError, match=f"{tmp_path} must be written whole, got: "), writing(tmp_path):
            raise error


@pytest.mark.parametrize(
    "error",
    [KeyError("a bug"), FileNotFoundError(errno.ENOENT, "gone", "a"), Exception("x (os error 2)"), OSError("?")],
)
def test_other_errors_keep_their_traceback(error: Exception, tmp_path: Path) -> None:
    def fails() -> None:
        with writing(tmp_path):
            raise error

    with pytest.raises(type(error)) as seen:
        run_with_user_errors(fails)
    assert seen.value is error
