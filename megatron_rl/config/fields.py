"""Walks the types of config models: which keys there are, and what may lie below them."""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

ITEM = "N"
"""Stands for any index of a list, or any name in a mapping, in a key such as `environments.N.name`."""


def branches(annotation: Any) -> list[Any]:
    """Members of a union without None, or the type inside Annotated; empty for any other type."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return [get_args(annotation)[0]]
    if origin in (Union, UnionType):
        return [branch for branch in get_args(annotation) if branch is not NoneType]
    return []


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """Models that a value of this type may be; lists and mappings are not entered."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for branch in branches(annotation) for model in models_in(branch)]


def tag_of(model: type[BaseModel]) -> tuple[str, str] | None:
    """(field, value) by which a model is chosen among those of a union, as in `kind: btv`; None if it has none."""
    for name, field in model.model_fields.items():
        values = get_args(field.annotation)
        if get_origin(field.annotation) is Literal and len(values) == 1:
            return name, str(values[0])
    return None


def items_in(annotation: Any) -> list[Any]:
    """Types of the items, if a value of this type may be a list, a tuple or a mapping."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return [arguments[1]]
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return [argument for argument in arguments if argument is not Ellipsis]
    return [item for branch in branches(annotation) for item in items_in(branch)]


def nested_models(annotation: Any, path: str = "") -> list[tuple[str, type[BaseModel]]]:
    """Models in a type, each with its path from there: empty for the value itself, `.N` for an item."""
    here = [(path, model) for model in models_in(annotation)]
    return here + [pair for item in items_in(annotation) for pair in nested_models(item, f"{path}.{ITEM}")]


def all_fields(
    model: type[BaseModel], prefix: str = "", above: tuple[type[BaseModel], ...] = ()
) -> Iterator[tuple[str, FieldInfo]]:
    """Every key with its field, parents first; a model that contains itself is entered once."""
    for name, field in model.model_fields.items():
        key = prefix + name
        yield key, field
        for path, nested in nested_models(field.annotation):
            if nested not in (*above, model):
                yield from all_fields(nested, f"{key}{path}.", (*above, model))


def follow(model: type[BaseModel], location: tuple[int | str, ...]) -> tuple[list[str], list[Any], FieldInfo | None]:
    """Key parts of a location in a validation error, the types allowed there, and the last field passed.

    Pydantic adds to a location the union branch it tried; such parts name no key and are left out. Where the branch was
    chosen by its tag, only its types go on.
    """
    parts: list[str] = []
    annotations: list[Any] = [model]
    field: FieldInfo | None = None
    for part in location:
        models = [model for annotation in annotations for model in models_in(annotation)]
        chosen = [model for model in models if (tag := tag_of(model)) and tag[1] == part]
        if chosen and len(models) > 1:
            annotations = [*chosen]
            continue
        below = known_fields(annotations)
        items = [item for annotation in annotations for item in items_in(annotation)]
        if part in below:
            field = below[str(part)]
            annotations = [field.annotation]
        elif items and not below:
            annotations = items
        else:
            continue
        parts.append(str(part))
    return parts, annotations, field


def known_fields(annotations: list[Any]) -> dict[str, FieldInfo]:
    """Fields by name of all models that a value of one of these types may be."""
    models = [model for annotation in annotations for model in models_in(annotation)]
    return {name: field for model in models for name, field in model.model_fields.items()}


def nearest(name: str, known: list[str]) -> str | None:
    """The known name that was probably meant, if one is near."""
    matches = difflib.get_close_matches(name, known, n=1)
    return matches[0] if matches else None
