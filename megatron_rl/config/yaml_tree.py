"""YAML as run files use it: floats such as 2e-4 are numbers, a key may occur once, errors name file and line."""

import re
from enum import Enum
from pathlib import Path, PurePath
from typing import Any

import yaml

from megatron_rl.config.errors import ConfigError

_FLOAT = re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$")
"""YAML 1.1 takes a float for one only with a point and a signed exponent; people write 2e-4."""


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                continue
            if key_node.value in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"a key may occur once, got {key_node.value} again", problem_mark=key_node.start_mark
                )
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Knows the same floats as the loader, so that a string which looks like one is quoted. Writes no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_multi_representer(PurePath, lambda dumper, path: dumper.represent_str(str(path)))
_Dumper.add_multi_representer(Enum, lambda dumper, member: dumper.represent_data(member.value))
for _side in (_Loader, _Dumper):
    _side.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


def parse(text: str, source: str) -> Any:
    """Value of a YAML text; ConfigError with the source's name and the line if it is malformed."""
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{source}:{mark.line + 1}" if mark else source
        reason = " ".join(part for part in (error.problem, error.context) if part)
        raise ConfigError(f"{place}: not valid YAML: {reason}; mend this line") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{source}: not valid YAML: {' '.join(str(error).split())}; mend it") from None


def read(path: Path) -> dict[str, Any]:
    """The mapping in a file; ConfigError if the file is missing, unreadable, malformed or something else."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"config file {path} does not exist; give the path of a YAML file") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"config file {path} cannot be read: {reason}; give the path of a YAML file") from None
    tree = parse(text, str(path))
    if not isinstance(tree, dict):
        raise ConfigError(f"config file {path} must hold a mapping, got {shown(tree)}; write lines `key: value`")
    return tree


def dump(tree: Any) -> str:
    """YAML text, keys in their order."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def shown(value: Any, limit: int = 80) -> str:
    """A value on one line as YAML, strings quoted, cut to limit characters."""
    text = (
        repr(value)
        if isinstance(value, str)
        else yaml.dump(value, Dumper=_Dumper, default_flow_style=True, sort_keys=False, allow_unicode=True, width=10**6)
        .removesuffix("...\n")
        .strip()
    )
    return text if len(text) <= limit else text[: limit - 3] + "..."
