"""How a user's error leaves a process."""

import pytest

from megatron_rl.cli.user_errors import run_with_user_errors
from megatron_rl.config import ConfigError, RunStop


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
