"""What a run file says about the datasets of a mixture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from megatron_rl.config import ConfigModel


class DatasetConfig(ConfigModel):
    """One dataset of a mixture. A path alone stands for a dataset with that path and the defaults."""

    path: str = Field(min_length=1)
    """A .jsonl or .parquet file, a folder written by save_to_disk of `datasets`, or a folder of such files."""
    name: str = ""
    """What reports and metrics call it, different for each dataset; empty: the last part of the path, a file's without
    its suffix."""
    weight: float | None = Field(ge=0, default=None)
    """Its share of the rows of a pass, which are as many as all datasets have; either all have a weight or none has."""
    epochs: float | None = Field(gt=0, default=None)
    """How often a pass draws each row, 1 if neither weight nor epochs is given; 0.5: half the rows, the next pass the
    other half."""

    @model_validator(mode="before")
    @classmethod
    def _path_alone(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _one_measure(self) -> "DatasetConfig":
        if self.weight is not None and self.epochs is not None:
            raise ValueError(
                f"a dataset may have weight or epochs, got both ({self.weight:g} and {self.epochs:g}); remove one"
            )
        return self

    @property
    def label(self) -> str:
        """The name, or what stands for it."""
        path = Path(self.path)
        return self.name or (path.stem if path.suffix in (".jsonl", ".parquet") else path.name)


def check_mixture(configs: Sequence[DatasetConfig]) -> None:
    """ValueError unless there is one, names differ, and all have weights, not all zero, or none has.

    What each dataset is by itself, its model has checked.
    """
    if not configs:
        raise ValueError("a mixture must have at least one dataset, got none; name a file")
    names = [config.label for config in configs]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(
            f"datasets must have different names, got {', '.join(repeated)} more than once; set name, "
            "or draw one dataset more often with epochs"
        )
    weights = [config.weight for config in configs]
    if None in weights and any(weight is not None for weight in weights):
        without = [config.label for config in configs if config.weight is None]
        raise ValueError(
            f"either all datasets have a weight or none has, got none for {', '.join(without)}; "
            "add theirs, or use epochs throughout"
        )
    if weights and not any(weight is None or weight > 0 for weight in weights):
        raise ValueError("weights must not all be zero, got nothing else; give one dataset a weight above 0")
