"""Single-machine runs: which processes, in which order, and what a person sees meanwhile."""

import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from megatron_rl.checkpoint.folders import META_NAME, checkpoint_step, latest_checkpoint
from megatron_rl.cli.output_folder import check_folder
from megatron_rl.cli.preflight import changed_keys, check_rl, check_sft
from megatron_rl.cli.rank import CHECKED
from megatron_rl.cli.runs import CONFIG_FILE, RlRun, RunConfig, SftRun
from megatron_rl.cli.supervisor import SAVE_S, Part, PartHandle, RunLock, Supervisor
from megatron_rl.config import ConfigError, ConfigModel
from megatron_rl.config.load import dump_config
from megatron_rl.engine.server import engine_command, free_port, require_free_port, wait_until_ready
from megatron_rl.loss.formula import objective_formula
from megatron_rl.telemetry.progress import follow
from megatron_rl.telemetry.report import build_report
from megatron_rl.telemetry.sinks import read_metrics, write_status
from megatron_rl.trainer.config import TrainerConfig


def run_sft(run: SftRun) -> Path:
    """Trains to the last step (resuming if the folder has a checkpoint); returns the run folder."""
    check_sft(run)
    with hold_run_folder(run) as folder:
        if not _is_complete(folder, run.trainer):
            trainer = _trainer_part(run.run, folder, "megatron_rl.cli.train_sft")
            _supervise([trainer], folder, total_steps=run.trainer.steps, label="SFT")
        build_report(folder, folder / "report.html")
    return folder


def run_rl(run: RlRun) -> Path:
    """Starts engines, orchestrator and trainer, and trains to the last step; returns the run folder.

    Starts no engines where engine.urls names some.
    """
    check_rl(run)
    addressed = with_addresses(run)
    engines = [] if run.engine.urls else engine_parts(addressed, run.run.folder)
    with hold_run_folder(run) as folder:
        if not _is_complete(folder, run.trainer):
            overrides = _addresses(addressed)
            orchestrator = Part(
                name="orchestrator",
                argv=[sys.executable, "-m", "megatron_rl.cli.orchestrate", str(folder / CONFIG_FILE), *overrides],
                env={},
                log_path=folder / "logs" / "orchestrator.log",
                finishes=True,
            )
            trainer = _trainer_part(run.run, folder, "megatron_rl.cli.train_rl", overrides)
            _supervise([*engines, orchestrator, trainer], folder, total_steps=run.trainer.steps, label="RL")
        build_report(folder, folder / "report.html")
    return folder


def run_evaluation(run: RlRun, out: Path) -> Path:
    """Starts engines on run.model and writes out/eval.json; returns its path."""
    check_rl(run)
    if run.engine.urls:
        raise ConfigError(
            f"an evaluation starts engines of its own on model.path, got engine.urls {run.engine.urls}; remove them"
        )
    check_folder(out, "--out")
    config, result = out / CONFIG_FILE, out / "eval.json"
    config.write_text(dump_config(run), encoding="utf-8")
    addressed = with_addresses(run)
    evaluator = Part(
        name="evaluation",
        argv=[sys.executable, "-m", "megatron_rl.cli.evaluate", str(config), str(result), *_addresses(addressed)],
        env={},
        log_path=out / "logs" / "evaluation.log",
        finishes=True,
        wave=1,
    )
    Supervisor(
        [*engine_parts(addressed, out), evaluator], on_status=lambda text: print(f"eval  {text}", flush=True)
    ).run()
    return result


def with_addresses(run: RlRun) -> RlRun:
    """The run with every address that was left open filled in by a free loopback port."""
    orchestrator, engine = run.orchestrator, run.engine
    if not orchestrator.address:
        orchestrator = orchestrator.model_copy(update={"address": f"tcp://127.0.0.1:{free_port()}"})
    if not engine.urls:
        ports = [engine.port + index if engine.port else free_port() for index in range(engine.count)]
        for port in ports:
            require_free_port(engine.host, port)
        engine = engine.model_copy(update={"urls": [f"http://{engine.host}:{port}" for port in ports]})
    return run.model_copy(update={"orchestrator": orchestrator, "engine": engine})


def engine_parts(run: RlRun, folder: Path) -> list[Part]:
    """One supervised vLLM server per URL of the run."""
    parts = []
    for index, url in enumerate(run.engine.urls):
        log_path = folder / "logs" / f"engine-{index}.log"
        argv, env = engine_command(
            run.engine,
            run.model.path,
            platform=run.run.platform,
            port=int(url.rsplit(":", 1)[1]),
            seed=run.run.seed + index,
        )
        if run.run.platform == "cuda":
            env["CUDA_VISIBLE_DEVICES"] = _gpu(run.run.processes + index)

        def ready(handle: PartHandle, url: str = url, log_path: Path = log_path) -> None:
            wait_until_ready(url, handle, log_path, run.engine.start_timeout_s)

        parts.append(Part(name=f"engine-{index}", argv=argv, env=env, log_path=log_path, ready=ready, wave=0))
    return parts


def _gpu(index: int) -> str:
    """Name of the index-th GPU that this process may use; the trainer's ranks have the first ones."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[index] if visible else str(index)


def _addresses(run: RlRun) -> list[str]:
    """Overrides by which the processes of one start find each other; RUN/config.yaml holds for every start."""
    return [f"orchestrator.address={run.orchestrator.address}", f"engine.urls=[{', '.join(run.engine.urls)}]"]


def _trainer_part(run: RunConfig, folder: Path, module: str, overrides: Sequence[str] = ()) -> Part:
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(run.processes),
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        str(free_port()),
    ]
    return Part(
        name="trainer",
        argv=[*torchrun, "-m", module, str(folder / CONFIG_FILE), *overrides],
        env={
            "OMP_NUM_THREADS": str(run.threads),
            "OMP_WAIT_POLICY": "passive",
            CHECKED: "1",
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(int(SAVE_S)),
        },
        log_path=folder / "logs" / "trainer.log",
        finishes=True,
        saves=True,
    )


@contextmanager
def hold_run_folder(run: SftRun | RlRun) -> Iterator[Path]:
    """Locks the run folder, says what changed since the last start, writes the resolved config."""
    folder = run.run.folder
    folder.mkdir(parents=True, exist_ok=True)
    with RunLock(folder):
        path = folder / CONFIG_FILE
        if path.exists():
            _say_what_resumes(path, run, folder)
        if isinstance(run, RlRun):
            print(objective_formula(run.loss, has_reference=run.trainer.reference is not None), flush=True)
        path.write_text(dump_config(run), encoding="utf-8")
        yield folder


def _say_what_resumes(path: Path, run: ConfigModel, folder: Path) -> None:
    old, new = _last_config(path), yaml.safe_load(dump_config(run))
    kinds = ["RL" if "environments" in tree else "SFT" for tree in (old or new, new)]
    if kinds[0] != kinds[1]:
        raise ConfigError(
            f"run.dir must be a new folder or one of an {kinds[1]} run, got {folder} of an {kinds[0]} run; "
            "choose another run.dir"
        )
    read_metrics(folder)  # DataError now rather than in the trainer
    latest = latest_checkpoint(folder / "checkpoints")
    print(f"resuming {folder} from {latest.name if latest else 'its start: it has no checkpoint yet'}", flush=True)
    changed = changed_keys(old, new) if old else []
    if changed:
        print(f"changed since the last start: {', '.join(changed)}", flush=True)


def _last_config(path: Path) -> dict[str, Any]:
    """Config of the last start; empty if a full disk or a power failure has damaged the file."""
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError):
        return {}
    return tree if isinstance(tree, dict) else {}


def _is_complete(folder: Path, trainer: TrainerConfig) -> bool:
    """Whether the last step was saved and its weights were written; says so if it is."""
    latest = latest_checkpoint(folder / "checkpoints")
    if latest is None or checkpoint_step(latest) < trainer.steps:
        return False
    hf = folder / "hf"
    # Weights of an earlier last step are older than the checkpoint of this one.
    if trainer.export and not (hf.is_dir() and hf.stat().st_mtime >= (latest / META_NAME).stat().st_mtime):
        return False
    print(
        f"the run in {folder} is complete: {checkpoint_step(latest)} steps are done and trainer.steps is "
        f"{trainer.steps}; raise it to go on, or choose another run.dir to start anew",
        flush=True,
    )
    return True


def _supervise(parts: list[Part], folder: Path, *, total_steps: int, label: str) -> None:
    stop = threading.Event()
    progress = threading.Thread(
        target=partial(follow, folder, stop, total_steps=total_steps, label=label), name="progress", daemon=True
    )
    progress.start()
    try:
        Supervisor(parts, on_status=lambda text: write_status(folder, text)).run()
    finally:
        stop.set()
        progress.join(timeout=5)
