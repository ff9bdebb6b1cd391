"""Real process trees under the supervisor; what is left is looked up by command line, which it does not use."""

import errno
import os
import signal
import sys
import textwrap
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from megatron_rl.cli.supervisor import Part, PartHandle, RunFailed, Supervisor

# argv: marker, folder. Descendants that only a SIGKILL ends: in the group without the environment that marks the run,
# in a session of its own, in one with an overwritten title, and on demand in one without the environment.
TREE = """
import os, pathlib, subprocess, sys, time
marker, folder = sys.argv[1:]
stubborn = ["-c", "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
                  "open(sys.argv[2], 'w').close(); time.sleep(60)"]
titled = ["-c", "import setproctitle, sys, time; setproctitle.setproctitle('VLLM::EngineCore ' + sys.argv[1] * 20); "
                "open(sys.argv[2], 'w').close(); time.sleep(60)"]
def start(name, code, **kwargs):
    subprocess.Popen([sys.executable, *code, marker, f"{folder}/{name}"], **kwargs)
    return pathlib.Path(folder, name)
started = [start("group", stubborn, env={}), start("session", stubborn, start_new_session=True),
           start("titled", titled, start_new_session=True)]
if "CLEARED" in os.environ:
    started.append(start("cleared", stubborn, start_new_session=True, env={}))
while not all(path.exists() for path in started):
    time.sleep(0.01)
pathlib.Path(folder, "leader").write_text(str(os.getpid()))
"""
ENDLESS = "import time; time.sleep(60)"


class Run:
    """Builds parts whose every process carries one marker on its command line."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.marker = uuid.uuid4().hex
        self.statuses: list[str] = []

    def part(
        self,
        name: str,
        code: str,
        *,
        env: dict[str, str] | None = None,
        ready: Callable[[PartHandle], None] | None = None,
        finishes: bool = False,
        wave: int = 0,
    ) -> Part:
        argv = [sys.executable, "-c", textwrap.dedent(code), self.marker, str(self.folder)]
        log_path = self.folder / "logs" / f"{name}.log"
        return Part(name, argv, env or {}, log_path, ready=ready, finishes=finishes, wave=wave)

    def supervise(self, *parts: Part, grace_s: float = 1.0, poll_s: float = 0.05) -> None:
        Supervisor(parts, grace_s=grace_s, poll_s=poll_s, on_status=self.statuses.append).run()

    def left(self) -> list[psutil.Process]:
        """The marker's processes that have not ended."""
        return [
            process
            for process in psutil.process_iter(["cmdline", "status"])
            if any(self.marker in word for word in process.info["cmdline"] or [])
            and process.info["status"] != psutil.STATUS_ZOMBIE
        ]

    def wait_for(self, *names: str) -> None:
        deadline = time.monotonic() + 10
        while not all((self.folder / name).exists() for name in names):
            assert time.monotonic() < deadline, f"no {names} in {os.listdir(self.folder)}"
            time.sleep(0.02)

    def wait_for_pid(self, name: str) -> int:
        self.wait_for(name)
        while not (text := (self.folder / name).read_text()):
            time.sleep(0.02)
        return int(text)

    def killer(self, find_victim: Callable[[], int]) -> threading.Thread:
        """Kills a process once it is there, from a thread as a user would from another terminal."""
        thread = threading.Thread(target=lambda: os.kill(find_victim(), signal.SIGKILL))
        thread.start()
        return thread


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    yield run
    left = run.left()
    for process in left:
        process.kill()
    assert not left, f"left behind: {[process.cmdline()[3:] for process in left]}"


def test_run_ends_with_its_finishing_parts_and_leaves_no_process_of_the_others(run: Run) -> None:
    service = run.part("service", TREE + ENDLESS, env={"CLEARED": "1"}, ready=lambda _handle: run.wait_for("leader"))
    trainer = run.part("trainer", "print('last step')", finishes=True, wave=1)
    run.supervise(service, trainer)
    assert run.left() == []
    assert run.statuses[0] == "starting service"
    assert run.statuses[1].startswith("service ready after ")
    assert run.statuses[2:] == ["starting trainer", "stopping service"]
    assert (run.folder / "logs" / "trainer.log").read_text() == "last step\n"


def test_what_a_finished_part_leaves_behind_is_ended_before_the_run_goes_on(run: Run) -> None:
    leaves = run.part("leaves", TREE, env={"CLEARED": "1"}, finishes=True)

    def only_this_part_is_left(_handle: PartHandle) -> None:
        run.wait_for("leader")
        deadline = time.monotonic() + 5
        while len(run.left()) > 2:  # the waiting part and its keeper
            assert time.monotonic() < deadline, [process.cmdline()[3:] for process in run.left()]
            time.sleep(0.05)

    run.supervise(leaves, run.part("waits", ENDLESS, ready=only_this_part_is_left))


def test_failed_part_is_named_with_its_status_and_the_log_of_this_start_only(run: Run) -> None:
    code = "for line in range(40): print('line', line)\nraise SystemExit(3)"
    trainer = run.part("trainer", code, finishes=True)
    trainer.log_path.parent.mkdir()
    trainer.log_path.write_text("an earlier start\n")
    with pytest.raises(RunFailed) as failure:
        run.supervise(run.part("service", TREE + ENDLESS), trainer)
    message = str(failure.value)
    assert failure.value.part == "trainer" and failure.value.returncode == 3
    assert message.startswith("trainer died (exit status 3)")
    assert f"last lines of {trainer.log_path}:\n  | line 25\n" in message
    assert "  | line 39\n" in message and "line 24" not in message
    assert "resume from the last checkpoint" in message


def test_log_of_an_earlier_start_is_not_shown_as_this_ones(run: Run) -> None:
    trainer = run.part("trainer", "raise SystemExit(3)", finishes=True)
    trainer.log_path.parent.mkdir()
    trainer.log_path.write_text("an earlier start\n")
    with pytest.raises(RunFailed, match=r"it wrote nothing to .*trainer.log"):
        run.supervise(trainer)


def test_a_full_disk_is_named_and_keeps_nothing_from_being_stopped(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_text: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("shutil.disk_usage", lambda _path: SimpleNamespace(free=1000))
    trainer = run.part("trainer", "raise SystemExit(1)", finishes=True)
    with pytest.raises(RunFailed, match=r"trainer died(?s:.*)the disk of .*logs is full: make room"):
        Supervisor([run.part("service", ENDLESS), trainer], grace_s=1, poll_s=0.05, on_status=full).run()
    assert run.left() == []


def test_service_that_ends_with_0_has_died(run: Run) -> None:
    with pytest.raises(RunFailed, match=r"service died \(exit status 0\)"):
        run.supervise(run.part("service", "pass"), run.part("trainer", ENDLESS, finishes=True))


def test_command_that_does_not_exist_is_named(run: Run) -> None:
    part = Part("engine", ["/no/such/program"], {}, run.folder / "engine.log")
    with pytest.raises(RunFailed, match=r"(?s)engine died \(exit status 127\).*cannot start /no/such/program: No such"):
        run.supervise(part)


@pytest.mark.parametrize("victim", ["leader", "keeper"])
def test_killed_part_is_named_within_seconds_and_its_whole_tree_ended(run: Run, victim: str) -> None:
    def find_victim() -> int:
        leader = run.wait_for_pid("leader")
        return leader if victim == "leader" else psutil.Process(leader).ppid()

    killer = run.killer(find_victim)
    # Without a keeper, a descendant that is in another session and hides its environment is out of reach.
    env = {"CLEARED": "1"} if victim == "leader" else None
    started = time.monotonic()
    with pytest.raises(RunFailed) as failure:
        run.supervise(run.part("engine", TREE + ENDLESS, env=env), run.part("trainer", ENDLESS, finishes=True))
    killer.join()
    assert str(failure.value).startswith("engine died (signal SIGKILL)")
    assert "out of memory" in str(failure.value)
    assert time.monotonic() - started < 8


def test_of_parts_found_dead_together_the_killed_one_is_named_first(run: Run) -> None:
    kills_itself = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    parts = [
        run.part("trainer", "raise SystemExit(1)", finishes=True),
        run.part("engine", kills_itself),
        run.part("orchestrator", ENDLESS, finishes=True),
    ]
    with pytest.raises(RunFailed) as failure:
        run.supervise(*parts, poll_s=2.0)
    assert failure.value.part == "engine"
    assert "ended at the same time: trainer (exit status 1, log " in str(failure.value)


def test_parts_of_a_wave_get_ready_together_and_the_next_wave_only_then(run: Run) -> None:
    together = threading.Barrier(2, timeout=5)

    def ready(_handle: PartHandle) -> None:
        together.wait()
        time.sleep(0.3)
        assert not (run.folder / "second").exists()

    second = "import pathlib, sys; pathlib.Path(sys.argv[2], 'second').touch()"
    run.supervise(
        run.part("trainer", second, finishes=True, wave=1),
        run.part("engine-0", ENDLESS, ready=ready),
        run.part("engine-1", ENDLESS, ready=ready),
    )
    assert (run.folder / "second").exists()


def test_part_that_does_not_become_ready_is_named_and_everything_ended(run: Run) -> None:
    def ready(handle: PartHandle) -> None:
        assert handle.alive and handle.poll() is None and handle.log_path.name == "engine.log"
        run.wait_for("leader")
        raise TimeoutError("no answer after 2 s")

    with pytest.raises(RunFailed, match="engine did not become ready: no answer after 2 s") as failure:
        run.supervise(run.part("engine", TREE + "print('loading', flush=True)\n" + ENDLESS, ready=ready))
    assert isinstance(failure.value.__cause__, TimeoutError)


def test_log_lines_that_a_readiness_error_already_shows_are_not_repeated(run: Run) -> None:
    def ready(handle: PartHandle) -> None:
        run.wait_for("spoken")
        raise TimeoutError(f"no answer; {handle.log_path} ends with: loading")

    code = "import pathlib, sys; print('loading', flush=True); pathlib.Path(sys.argv[2], 'spoken').touch()\n" + ENDLESS
    with pytest.raises(RunFailed) as failure:
        run.supervise(run.part("engine", code, ready=ready))
    assert str(failure.value).count("loading") == 1


def test_death_of_a_part_ends_the_wait_for_another(run: Run) -> None:
    started = time.monotonic()
    with pytest.raises(RunFailed, match=r"orchestrator died \(exit status 4\)"):
        run.supervise(
            run.part("engine", ENDLESS, ready=lambda _handle: time.sleep(30)),
            run.part("orchestrator", "raise SystemExit(4)", finishes=True),
        )
    assert time.monotonic() - started < 5


def test_readiness_check_that_fails_on_a_dying_part_reports_the_death(run: Run) -> None:
    def ready(handle: PartHandle) -> None:
        run.wait_for("dying")
        raise ConnectionError("refused")

    code = """
    import pathlib, sys, time
    pathlib.Path(sys.argv[2], "dying").touch()
    time.sleep(0.4)
    raise SystemExit(5)
    """
    with pytest.raises(RunFailed, match=r"engine died \(exit status 5\)"):
        run.supervise(run.part("engine", code, ready=ready))
