"""Environments by name. A run file's `environments` list is made of EnvironmentConfig."""

import importlib
import traceback
from difflib import get_close_matches
from typing import Any

from pydantic import Field, ValidationError

from megatron_rl.config import ConfigError, ConfigModel
from megatron_rl.records import Prompt
from megatron_rl.rollout.env import Environment

BUILT_IN = {
    "baker": "megatron_rl.rollout.environments.baker:Baker",
    "reasoning_gym": "megatron_rl.rollout.environments.reasoning_gym_env:ReasoningGym",
}


class EnvironmentConfig(ConfigModel):
    """One environment of a run."""

    name: str
    """baker, reasoning_gym, or package.module:Class of your own: a class with Options (a ConfigModel) and
    __init__(options, *, name) that follows megatron_rl.rollout.env.Environment."""
    label: str | None = None
    """Name in metrics and prompt ids; null: the name, or the class name of your own. Two environments of a run
    need two labels."""
    weight: float = Field(gt=0, default=1.0)
    """Share of prompts, relative to the other environments of the run."""
    options: dict[str, Any] = {}
    """Options of this environment, checked by its class."""


def make_environment(config: EnvironmentConfig) -> Environment:
    """The environment a config names. ConfigError for an unknown name, a class that fails or a bad option."""
    kind = _environment_class(config.name)
    label = config.label or (kind.__name__ if ":" in config.name else config.name)
    options = _checked_options(kind.Options, config.options, label)
    try:
        return kind(options, name=label)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"environment {label} must be ready to use, but its class {failure(error)}; mend it"
        ) from error


def check_environment(environment: Environment) -> list[Prompt]:
    """The first prompt of every split. ConfigError if the environment fails to give one."""
    prompts = []
    for split in environment.splits:
        try:
            size = environment.size(split)
            prompts.append(environment.prompt(split, 0))
        except Exception as error:
            raise ConfigError(
                f"environment {environment.name} must have a first prompt in its split {split}, but it "
                f"{failure(error)}; mend it"
            ) from error
        if size == 0 or not isinstance(prompts[-1], Prompt):
            got = "none" if size == 0 else type(prompts[-1]).__name__
            raise ConfigError(
                f"environment {environment.name} must give megatron_rl.records.Prompt in its split {split}, got {got}"
            )
    return prompts


def failure(error: BaseException) -> str:
    """What an environment's code raised, and where."""
    frames = traceback.extract_tb(error.__traceback__)
    # The frames of a syntax error end in the importer; its text has the place.
    where = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames and not isinstance(error, SyntaxError) else ""
    return f"raises {type(error).__name__}: {error}{where}"


def _environment_class(name: str) -> Any:
    target = name if ":" in name else BUILT_IN.get(name)
    if target is None:
        near = get_close_matches(name, BUILT_IN, n=2, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise ConfigError(
            f"environments.name must be one of {sorted(BUILT_IN)} or package.module:Class, got {name!r}; "
            f"{hint}A class of your own must be importable"
        )
    module_name, _, class_name = target.partition(":")
    try:
        kind = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"environments.name must name an importable class, got {name!r}: {error}") from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f"environments.name must name an importable class, but {name!r} {failure(error)}") from error
    options = getattr(kind, "Options", None)
    if not (isinstance(options, type) and issubclass(options, ConfigModel)):
        raise ConfigError(f"environment {name} needs a class attribute Options that is a ConfigModel, got {options!r}")
    return kind


def _checked_options(model: type[ConfigModel], options: dict[str, Any], label: str) -> ConfigModel:
    try:
        return model.model_validate(options)
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(map(str, problem["loc"]))
        where = f"environment {label}: options" + (f".{key}" if key else "")
        if problem["type"] == "extra_forbidden":
            near = get_close_matches(key, model.model_fields, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else "remove it"
            raise ConfigError(f"{where} is unknown; {hint} Options are {sorted(model.model_fields)}") from error
        message = problem["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{where} does not fit, got {problem.get('input')!r}: {message}") from error
