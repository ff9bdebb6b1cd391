"""From a YAML file and key=value overrides to a checked config, and back.

Relative paths inside a config are relative to the current directory, not to the file. Nothing is interpolated.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from megatron_rl.config import yaml_tree
from megatron_rl.config.errors import ConfigError
from megatron_rl.config.model import ConfigModel
from megatron_rl.config.problems import problems

ModelT = TypeVar("ModelT", bound=ConfigModel)


def load_config(path: str | Path, model_type: type[ModelT], overrides: Sequence[str] = ()) -> ModelT:
    """The config in a YAML file after overrides such as `trainer.steps=10`.

    One ConfigError lists every problem, each with rule, value and cure; an unknown key gets the nearest known one.
    """
    tree = read_tree(path, overrides)
    try:
        return model_type.model_validate(tree)
    except ValidationError as error:
        found = problems(error, model_type)
    if len(found) == 1:
        raise ConfigError(f"{path}: {found[0]}")
    raise ConfigError(f"{path}: {len(found)} problems" + "".join(f"\n  {problem}" for problem in found))


def read_tree(path: str | Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The YAML mapping in a file after overrides, unchecked."""
    tree = yaml_tree.read(Path(path))
    for override in overrides:
        _apply(tree, override)
    return tree


def dump_config(config: BaseModel) -> str:
    """The config with every default resolved, as YAML that load_config reads back to an equal config."""
    return yaml_tree.dump(config.model_dump())


def _apply(tree: dict[str, Any], override: str) -> None:
    """Sets `key.sub=value` in place; the value is YAML, a list index is a number."""
    key, equals, text = override.partition("=")
    parts = key.split(".")
    if not equals or not all(part and part == part.strip() for part in parts):
        raise ConfigError(f"an override reads key.sub=value, got {override!r}; write it like trainer.steps=10")
    value = yaml_tree.parse(text, f"override {override!r}")
    node: Any = tree
    for depth, part in enumerate(parts[:-1]):
        if isinstance(node, dict) and node.get(part) is None:
            node[part] = {}
        node = node[_member(node, part, parts[:depth], override)]
    node[_member(node, parts[-1], parts[:-1], override)] = value


def _member(node: Any, part: str, above: list[str], override: str) -> str | int:
    """The key or index by which part lies in node; ConfigError if node has no such place."""
    if isinstance(node, dict):
        return part
    parent = ".".join(above)
    if not isinstance(node, list):
        raise ConfigError(
            f"override {override!r} goes below {parent}, which holds {yaml_tree.shown(node)}; set {parent} itself"
        )
    if not part.isdecimal() or int(part) >= len(node):
        raise ConfigError(
            f"override {override!r} needs an index of {parent}, which has {len(node)} items, got {part!r}; "
            f"count from 0, or set {parent} to a whole list"
        )
    return int(part)
