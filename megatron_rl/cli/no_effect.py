"""Options that a combination of others makes meaningless: set to anything but their default, they are an error.

A resolved config names every option, so an option counts as set when it differs from its default.
"""

from collections.abc import Iterator

from megatron_rl.cli.runs import RlRun, SftRun
from megatron_rl.config import ConfigError, ConfigModel


def check_sft_options(run: SftRun) -> None:
    """ConfigError for the first option without effect."""
    if run.run.platform == "cuda":
        _refuse(run.run, "run", ["threads"], "with run.platform cuda")
    if not run.data.heldout:
        _refuse(run.trainer, "trainer", ["heldout_every_steps"], "without data.heldout")


def check_rl_options(run: RlRun) -> None:
    """ConfigError for the first option without effect."""
    if run.engine.urls:
        started_here = ["count", "port", "start_timeout_s"]
        _refuse(run.engine, "engine", started_here, "with engine.urls, which names engines that are started apart")
    if run.run.platform == "cuda":
        _refuse(run.run, "run", ["threads"], "with run.platform cuda")
        _refuse(run.engine, "engine", ["kv_cache_gib", "cpu_threads"], "with run.platform cuda")
    else:
        _refuse(run.engine, "engine", ["gpu_memory_share"], "with run.platform cpu")
    if run.loss.tau == 0:
        _refuse(run.loss, "loss", ["regulariser_tokens"], "with loss.tau 0")


def _refuse(config: ConfigModel, prefix: str, names: list[str], condition: str) -> None:
    for name, value in _set_options(config, names):
        raise ConfigError(f"{prefix}.{name} has no effect {condition}, got {value!r}; remove one of the two")


def _set_options(config: ConfigModel, names: list[str]) -> Iterator[tuple[str, object]]:
    for name in names:
        value = getattr(config, name)
        if value != type(config).model_fields[name].default:
            yield name, value
