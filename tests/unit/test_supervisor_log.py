"""What is shown of a dead part's log."""

from pathlib import Path

from megatron_rl.cli.log_tail import last_lines

# As torchrun (torch 2.13) wrote it, shortened.
TORCHRUN = """\
training
ValueError: the real reason
W1201 04:41:25.390000 11080 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process 11083 closing signal SIGTERM
E1201 04:41:25.393000 11080 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1) local_rank: 1 (pid: 11084) of binary: python
Traceback (most recent call last):
  File "<frozen runpy>", line 198, in _run_module_as_main
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
w.py FAILED
"""  # noqa: E501


def test_the_failed_ranks_own_words_are_kept_and_torchruns_table_is_not(tmp_path: Path) -> None:
    log = tmp_path / "trainer.log"
    log.write_text(TORCHRUN)
    lines = last_lines(log, count=3)
    assert lines[0] == "ValueError: the real reason"
    assert "failed (exitcode: 1) local_rank: 1" in lines[-1]


def test_only_the_last_state_of_a_progress_bar_is_shown(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_bytes(b"loading\r\n 10%\r 50%\r 100%\r\n\n")
    assert last_lines(log) == ["loading", " 100%"]


def test_of_a_huge_or_binary_log_the_end_is_read_and_long_lines_are_cut(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_bytes(b"x" * 1_000_000 + b"\n\xff\xfe\nend\n")
    lines = last_lines(log)
    assert lines[-2:] == ["\N{REPLACEMENT CHARACTER}" * 2, "end"]
    assert max(map(len, lines)) <= 400


def test_a_log_that_is_gone_or_has_nothing_new_gives_no_lines(tmp_path: Path) -> None:
    assert last_lines(tmp_path / "none.log") == []
    log = tmp_path / "old.log"
    log.write_text("old\n")
    assert last_lines(log, start=4) == []
