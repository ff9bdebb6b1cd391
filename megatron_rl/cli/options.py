"""Arguments and options that several verbs share."""

from pathlib import Path
from typing import Annotated

import typer

Config = Annotated[Path, typer.Argument(help="YAML file of the run.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="key=value, such as trainer.steps=10.")]
MAX_SEED = 2**32 - 1
"""Largest seed that every library here takes."""
