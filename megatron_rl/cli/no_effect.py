"""Options that a combination of others makes meaningless: set to anything but their default, they are an error.

A resolved config names every option, so an option counts as set when it differs from its default.
"""

from collections.abc import Iterator

from megatron_rl.cli.runs import RlRun, SftRun
from megatron_rl.config import ConfigError, ConfigModel
from megatron_rl.trainer.reference_config import ReferenceConfig, check_offload


def check_sft_options(run: SftRun) -> None:
    """ConfigError for the first option without effect."""
    if run.run.platform == "cuda":
        _refuse(run.run, "run", ["threads"], "with run.platform cuda")
    if not run.data.heldout:
        _refuse(run.trainer, "trainer", ["heldout_every_steps"], "without data.heldout")
    if run.data.packing.kind == "stream":
        fixed = "with data.packing.kind stream, whose steps have microbatches_per_step"
        _refuse(run.data, "data", ["samples_per_step"], fixed)


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
    _check_objective(run)


def _check_objective(run: RlRun) -> None:
    loss, reference, sync_every = run.loss, run.trainer.reference, run.weight_sync.every_steps
    if loss.tau == 0:
        _refuse(run.loss, "loss", ["regulariser_tokens"], "with loss.tau 0")
    if reference is not None:
        check_offload(reference, run.run.platform)
        _check_resets(reference, steps=run.trainer.steps, eval_every=run.trainer.eval_every_steps)
    if loss.kl is not None and reference is None:
        raise ConfigError(
            "loss.kl needs a reference policy, got trainer.reference null; set trainer.reference={} for the model the "
            "run starts from, or remove loss.kl"
        )
    _check_guards(run)
    if loss.proximal is not None and loss.guard.kind in ("shrink", "derived"):
        raise ConfigError(
            f"loss.guard.kind {loss.guard.kind} cannot be used with loss.proximal, where it guards policy / proximal, "
            "which has no engine noise; set loss.proximal.guard to it, and tis, clip or clamp here"
        )
    if loss.proximal is not None and sync_every == 1:
        raise ConfigError(
            "loss.proximal has no effect with weight_sync.every_steps 1, where policy and proximal policy are the same "
            "weights; raise it, or remove loss.proximal and set loss.guard"
        )
    evaluates, calibrates = run.trainer.eval_every_steps, run.trainer.snr and run.trainer.snr.every_steps
    for name, every in (("trainer.eval_every_steps", evaluates), ("trainer.snr.every_steps", calibrates)):
        if sync_every > 1 and every == 1:
            raise ConfigError(
                f"weight_sync.every_steps has no effect with {name} 1, which updates the weights after every step, got "
                f"{sync_every}; raise one or remove the other"
            )
    if loss.entropy is not None and loss.entropy.tokens == "after_observation" and run.rollout.max_turns == 1:
        raise ConfigError(
            "loss.entropy.tokens after_observation has no effect with rollout.max_turns 1, where no observation comes "
            "between turns; choose all, or raise it"
        )


def _check_resets(reference: ReferenceConfig, *, steps: int, eval_every: int) -> None:
    """ConfigError for a reset that would come after the last step, or never."""
    every, patience = reference.reset_every_steps, reference.reset_after_plateau
    if every is not None and every >= steps:
        raise ConfigError(
            f"trainer.reference.reset_every_steps has no effect in a run of {steps} steps, got {every}; lower it, or "
            "remove it"
        )
    evaluations = (steps - 1) // eval_every
    if patience is not None and patience > evaluations:
        raise ConfigError(
            f"trainer.reference.reset_after_plateau has no effect where only {evaluations} evaluations follow the "
            f"first one before the last of {steps} steps, got {patience}; lower it or trainer.eval_every_steps, or "
            "remove it"
        )


def _check_guards(run: RlRun) -> None:
    """ConfigError for a guard that reads measurements which the run does not make, or makes too late."""
    loss, snr, steps = run.loss, run.trainer.snr, run.trainer.steps
    for name, guard in (("loss.guard", loss.guard), ("loss.proximal.guard", loss.proximal and loss.proximal.guard)):
        if guard is None or guard.kind not in ("shrink", "derived"):
            continue
        if snr is None:
            raise ConfigError(
                f"{name}.kind {guard.kind} reads what calibrations measure, got trainer.snr null; set trainer.snr={{}} "
                "or choose clamp"
            )
        if guard.kind == "shrink" and snr.every_steps >= steps:
            raise ConfigError(
                f"{name}.kind shrink has no effect with trainer.snr.every_steps={snr.every_steps} in a run of {steps} "
                "steps: lambda is 1 until a calibration that follows a step; lower it, or choose clamp"
            )


def _refuse(config: ConfigModel, prefix: str, names: list[str], condition: str) -> None:
    for name, value in _set_options(config, names):
        raise ConfigError(f"{prefix}.{name} has no effect {condition}, got {value!r}; remove one of the two")


def _set_options(config: ConfigModel, names: list[str]) -> Iterator[tuple[str, object]]:
    for name in names:
        value = getattr(config, name)
        if value != type(config).model_fields[name].default:
            yield name, value
