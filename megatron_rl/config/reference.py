"""The configuration reference as Markdown, written from the models and from nothing else."""

from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from megatron_rl.config.fields import all_fields, branches, items_in, nested_models, tag_of
from megatron_rl.config.model import ConfigModel
from megatron_rl.config.yaml_tree import shown

_HEAD = """# Configuration

Written by `make docs` from the models in the code; change those, not this page.
A run file is YAML. Any key can be set on the command line as `key.sub=value`; the value is read as YAML, items of a
list are counted from 0 (`environments.0.name=baker`). Unknown keys are refused. Relative paths are relative to the
current directory. `N` in a key stands for any index of a list or name in a mapping.
"""


def config_reference(models: list[tuple[str, type[ConfigModel]]]) -> str:
    """One chapter per (title, root model), one section with a table of keys per nested model. Markdown."""
    lines = [_HEAD]
    for title, model in models:
        lines += [f"## {title}", "", *_sections(model, "", ())]
    return "\n".join(lines).rstrip() + "\n"


def fields_without_description(model: type[BaseModel]) -> list[str]:
    """Keys, nested ones included, that lack the docstring which becomes their line in the reference."""
    return [key for key, field in all_fields(model) if not (field.description or "").strip()]


def _sections(model: type[BaseModel], prefix: str, above: tuple[type[BaseModel], ...]) -> list[str]:
    lines = [*([_one_line(model.__doc__), ""] if model.__doc__ else [])]
    if model.model_fields:
        lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
        lines += [_table_row(_cells(prefix + name, field)) for name, field in model.model_fields.items()]
        lines.append("")
    return lines + _sections_below(model, prefix, above)


def _sections_below(model: type[BaseModel], prefix: str, above: tuple[type[BaseModel], ...]) -> list[str]:
    lines = []
    for name, field in model.model_fields.items():
        by_path: dict[str, list[type[BaseModel]]] = {}
        for path, nested in nested_models(field.annotation):
            if nested not in (*above, model):
                by_path.setdefault(path, []).append(nested)
        for path, models in by_path.items():
            key = f"{prefix}{name}{path}"
            if len(models) > 1 and all(map(tag_of, models)):
                lines += [f"### {key}", "", *_choice(key, models)]
                lines += [line for one in models for line in _sections_below(one, f"{key}.", (*above, model))]
                continue
            for nested in models:
                lines += [f"### {key}", "", *_sections(nested, f"{key}.", (*above, model))]
    return lines


def _choice(key: str, models: list[type[BaseModel]]) -> list[str]:
    """Two tables about the models of a union that a tag tells apart: what each is, and the keys each has."""
    tags = {model: tag for model in models if (tag := tag_of(model))}
    name = tags[models[0]][0]
    lines = [f"| `{key}.{name}` | meaning |", "|---|---|"]
    lines += [_table_row([f"`{tags[model][1]}`", _one_line(model.__doc__)]) for model in models]
    rows = [
        _table_row([f"`{value}`", *_cells(f"{key}.{field_name}", field)])
        for model, (tag_name, value) in tags.items()
        for field_name, field in model.model_fields.items()
        if field_name != tag_name
    ]
    if rows:
        lines += ["", f"| {name} | key | type | default | meaning |", "|---|---|---|---|---|", *rows]
    return [*lines, ""]


def _cells(key: str, field: FieldInfo) -> list[str]:
    return [f"`{key}`", f"`{_type(field)}`", _default(field), _one_line(field.description)]


def _table_row(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True, validated_data={})
    if not isinstance(default, BaseModel):
        return f"`{shown(default)}`"
    tag = tag_of(type(default))
    return f"`{tag[0]}: {tag[1]}`" if tag else "see its keys"


def _type(field: FieldInfo) -> str:
    """Type and bounds, as in `int, >= 1` or `float | null, > 0`."""
    signs = {
        annotated_types.Ge: (">=", "ge"),
        annotated_types.Gt: (">", "gt"),
        annotated_types.Le: ("<=", "le"),
        annotated_types.Lt: ("<", "lt"),
        annotated_types.MinLen: ("length >=", "min_length"),
        annotated_types.MaxLen: ("length <=", "max_length"),
    }
    bounds = [
        f"{sign} {shown(getattr(bound, attribute))}"
        for bound in field.metadata
        for kind, (sign, attribute) in signs.items()
        if isinstance(bound, kind)
    ]
    return ", ".join([_type_name(field.annotation), *bounds])


def _type_name(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " | ".join(shown(value).strip("'") for value in arguments)
    if origin in (Union, UnionType):
        names = dict.fromkeys(_type_name(branch) for branch in branches(annotation))
        return " | ".join([*names, *(["null"] if NoneType in arguments else [])])
    if origin is Annotated:
        return _type_name(arguments[0])
    if items := items_in(annotation):
        kind = "mapping" if origin is dict else "list"
        return f"{kind} of {' and '.join(dict.fromkeys(_type_name(item) for item in items))}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "keys"
    return {"str": "text", "bool": "true | false", "Any": "anything"}.get(
        name := getattr(annotation, "__name__", str(annotation)), name
    )
