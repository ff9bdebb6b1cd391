"""The two root configs: one YAML tree per run, made of the models that live beside their owners."""

from pathlib import Path

from pydantic import Field

from megatron_rl.config import ConfigModel
from megatron_rl.config.load import load_config, read_tree
from megatron_rl.data.distill.config import BackfillRun, PrefillRun
from megatron_rl.data.sft import SftDataConfig
from megatron_rl.distributed.config import ParallelConfig
from megatron_rl.distributed.device import PlatformKind
from megatron_rl.engine.config import EngineConfig
from megatron_rl.loss.config import LossConfig
from megatron_rl.model.config import ModelConfig
from megatron_rl.orchestrator.config import OrchestratorConfig
from megatron_rl.rollout.environments import EnvironmentConfig
from megatron_rl.rollout.run import RolloutConfig
from megatron_rl.trainer.config import RlTrainerConfig, SftTrainerConfig
from megatron_rl.weight_sync.config import WeightSyncConfig

CONFIG_FILE = "config.yaml"
"""In a run folder: the resolved config of the last start."""


class RunConfig(ConfigModel):
    """Where a run lives and what it runs on."""

    dir: str = Field(min_length=1)
    """Run folder: config, metrics, rollouts, logs, checkpoints, report. An existing one is resumed."""
    seed: int = Field(ge=0, lt=2**32, default=0)
    """Seeds data order, prompts and sampling."""
    platform: PlatformKind = "cpu"
    """cpu (gloo) or cuda (NCCL); never guessed."""
    processes: int = Field(ge=1, default=1)
    """Trainer ranks the command starts here with torchrun; under your own torchrun it must be the world size."""
    threads: int = Field(ge=1, default=1)
    """Threads of each trainer rank on the CPU."""

    @property
    def folder(self) -> Path:
        """The run folder as a path, relative to the current directory."""
        return Path(self.dir)


class SftRun(ConfigModel):
    """Supervised fine-tuning."""

    run: RunConfig
    """Run folder, platform and processes."""
    model: ModelConfig
    """The checkpoint to train."""
    data: SftDataConfig
    """Conversations."""
    context_length: int = Field(ge=2)
    """Longest sample in tokens."""
    parallel: ParallelConfig = ParallelConfig()
    """How ranks share the model."""
    trainer: SftTrainerConfig = SftTrainerConfig()
    """Steps, optimizer, checkpoints."""


class RlRun(ConfigModel):
    """Reinforcement learning against a running engine."""

    run: RunConfig
    """Run folder, platform and processes."""
    model: ModelConfig
    """The checkpoint to train; engines start from it too."""
    environments: list[EnvironmentConfig] = Field(min_length=1)
    """Where prompts and rewards come from."""
    rollout: RolloutConfig = RolloutConfig()
    """How prompts are attempted."""
    engine: EngineConfig = EngineConfig()
    """The vLLM servers."""
    orchestrator: OrchestratorConfig = OrchestratorConfig()
    """Groups per step, redraws, evaluation."""
    loss: LossConfig = LossConfig()
    """The objective."""
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    """How weights travel to the engines."""
    parallel: ParallelConfig = ParallelConfig()
    """How ranks share the model."""
    trainer: RlTrainerConfig = RlTrainerConfig()
    """Steps, optimizer, checkpoints."""


def load_run(path: Path, overrides: list[str]) -> SftRun | RlRun | PrefillRun | BackfillRun:
    """The run of a YAML file: RL if it has environments, distillation if it has a kind, SFT otherwise."""
    tree = read_tree(path, overrides)
    if "kind" in tree:
        from megatron_rl.cli.distill import load_distill

        return load_distill(path, overrides)
    return load_config(path, RlRun if "environments" in tree else SftRun, overrides)
