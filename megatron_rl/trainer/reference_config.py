"""Which policy a run is compared with, and for how long. Importable without Megatron."""

import math
from pathlib import Path

from pydantic import Field, model_validator

from megatron_rl.checkpoint.identity import describe_model, describe_vocabulary, differences
from megatron_rl.config import ConfigError, ConfigModel, DataError
from megatron_rl.distributed.device import PlatformKind
from megatron_rl.model.families.family import HfConfig
from megatron_rl.model.folder import check_model_folder


class ReferenceConfig(ConfigModel):
    """The reference policy: frozen weights of the trained model's kind that score the trained tokens."""

    path: str | None = None
    """Hugging Face folder of the reference, of the same architecture, sizes and vocabulary as the model; null: the
    weights that the run starts from."""
    offload: bool = False
    """Keep the weights in pinned host memory and bring them to the GPU for each scoring pass. Only on cuda."""
    reset_every_steps: int | None = Field(ge=1, default=None)
    """The policy becomes the reference after every so many optimizer steps; null: not by steps."""
    reset_after_plateau: int | None = Field(ge=1, default=None)
    """The policy becomes the reference once so many evaluations in a row, every trainer.eval_every_steps, have not
    raised the held-out pass rate above its best since the last reset; null: not by evaluations."""
    reset_optimizer: bool = False
    """Adam's moments and step count start over with each reset. (ProRL, Liu et al. 2025)"""

    @property
    def resets(self) -> bool:
        """Whether the policy may become the reference."""
        return self.reset_every_steps is not None or self.reset_after_plateau is not None

    def resets_within(self, steps: int) -> int:
        """About how many resets fall into so many steps, rounded up; those by plateau count as one."""
        by_steps = 0 if self.reset_every_steps is None else math.ceil(steps / self.reset_every_steps)
        return by_steps + (self.reset_after_plateau is not None)

    @model_validator(mode="after")
    def _no_option_without_effect(self) -> "ReferenceConfig":
        if self.reset_optimizer and not self.resets:
            raise ValueError(
                "reset_optimizer has no effect without a reset of the reference, got true; set reset_every_steps or "
                "reset_after_plateau, or remove it"
            )
        return self


def check_reference(config: ReferenceConfig, *, model_path: Path, hf_config: HfConfig, platform: PlatformKind) -> None:
    """ConfigError unless the reference can stand in for the model of model_path, whose config.json is hf_config.

    Reads of the weights only the headers. Of the tokenizer only the vocabulary counts, as ids are all that a reference
    reads; a folder without one is accepted.
    """
    check_offload(config, platform)
    if config.path is None or Path(config.path).resolve() == Path(model_path).resolve():
        return
    try:
        there = check_model_folder(config.path)
    except (ConfigError, DataError) as error:
        raise ConfigError(f"trainer.reference.path must name a model that a run could train: {error}") from error
    different = differences(describe_model(there, ""), describe_model(hf_config, ""))
    if different:
        raise ConfigError(
            f"trainer.reference.path must hold a model like that of model.path, got in {config.path}: "
            f"{'; '.join(different)}; give a checkpoint of the same model"
        )
    vocabulary, own = describe_vocabulary(Path(config.path)), describe_vocabulary(Path(model_path))
    changed = sorted(name for name in vocabulary if own.get(name, vocabulary[name]) != vocabulary[name])
    if changed or (vocabulary and own and not vocabulary.keys() & own.keys()):
        raise ConfigError(
            f"trainer.reference.path must have the vocabulary of model.path, got other contents of "
            f"{', '.join(changed or vocabulary)} in {config.path}; if token ids mean the same there, copy those files "
            "from model.path"
        )


def check_offload(config: ReferenceConfig, platform: PlatformKind) -> None:
    """ConfigError where there is no other memory to put the reference in."""
    if config.offload and platform == "cpu":
        raise ConfigError(
            "trainer.reference.offload has no effect on platform cpu, where the policy itself is in host memory, got "
            "true; remove it"
        )
