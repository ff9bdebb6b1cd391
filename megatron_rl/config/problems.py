"""Turns a validation error into lines a person can act on: rule, value, cure."""

import re
from types import NoneType
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from megatron_rl.config.fields import ITEM, all_fields, follow, known_fields, models_in, nearest, tag_of
from megatron_rl.config.yaml_tree import shown


def problems(error: ValidationError, model: type[BaseModel]) -> list[str]:
    """One line per key that does not fit. Branches of a union that were tried on one value share a line."""
    by_key: dict[str, list[ErrorDetails]] = {}
    lines: dict[str, str] = {}
    for details in error.errors():
        parts, _, _ = follow(model, details["loc"])
        if details["type"] == "extra_forbidden":
            lines[".".join([*parts, str(details["loc"][-1])])] = _unknown_key(details, model)
        else:
            by_key.setdefault(".".join(parts), []).append(details)
    lines.update({key: _misfit(key, all_details, model) for key, all_details in by_key.items()})
    return list(lines.values())


def _unknown_key(details: ErrorDetails, model: type[BaseModel]) -> str:
    parts, annotations, _ = follow(model, details["loc"][:-1])
    name = str(details["loc"][-1])
    key = ".".join([*parts, name])
    known = list(known_fields(annotations))
    meant = nearest(name, known) or _elsewhere(key, model)
    tags = dict(tag for one in models_in(annotations[0]) if (tag := tag_of(one))) if len(annotations) == 1 else {}
    shown_names = ", ".join(f"{field}={tags[field]}" if field in tags else field for field in known)
    cure = f"did you mean {meant}?" if meant else f"known here: {shown_names or 'nothing'}"
    return f"unknown key {key}; {cure}"


def _elsewhere(key: str, model: type[BaseModel]) -> str | None:
    """The whole key, if exactly the name at the end of this one exists at one other place of the tree."""
    name = key.split(".")[-1]
    keys = {known for known, _ in all_fields(model) if known.split(".")[-1] == name and ITEM not in known.split(".")}
    return keys.pop() if len(keys) == 1 and key not in keys else None


def _misfit(key: str, all_details: list[ErrorDetails], model: type[BaseModel]) -> str:
    details = all_details[0]
    _, annotations, field = follow(model, details["loc"])
    meaning = " ".join((field.description or "").split()) if field else ""
    if details["type"] == "missing":
        return f"{key} is required and missing; add it" + (f": {meaning}" if meaning else "")
    if details["type"] in ("value_error", "assertion_error"):
        reason = re.sub(r"^(Value error|Assertion failed), ", "", details["msg"])
        return f"{key}: {reason}" if key else reason
    if details["type"].startswith("union_tag_"):
        return _wrong_tag(key, details, annotations, field)
    rules = list(dict.fromkeys(_rule(one["msg"]) for one in all_details))
    rule = " or ".join([rules[0], *(rule.removeprefix("must be ") for rule in rules[1:])])
    value: Any = details["input"]
    guess = nearest(value, re.findall(r"'([^']*)'", rule)) if isinstance(value, str) else None
    if guess:
        cure = f"did you mean {guess}?"
    elif field is not None and not field.is_required():
        default = field.get_default(call_default_factory=True, validated_data={})
        cure = "leave it out for the default" if isinstance(default, BaseModel) else f"the default is {shown(default)}"
        if value is False and NoneType in get_args(field.annotation) and default is not None:
            cure = "null switches it off"
    else:
        cure = meaning or "change it"
    return f"{key or 'the file'} {rule}, got {shown(value)}; {cure}"


def _wrong_tag(key: str, details: ErrorDetails, annotations: list[Any], field: FieldInfo | None) -> str:
    """A line about the key that chooses among the models of a union, as in `loss.policy.kind`."""
    context = details.get("ctx", {})
    name = str(context["discriminator"]).strip("'")
    models = [model for annotation in annotations for model in models_in(annotation)]
    values = [tag[1] for model in models if (tag := tag_of(model))]
    rule = f"must be {', '.join(map(repr, values[:-1]))} or {values[-1]!r}"
    if details["type"] == "union_tag_not_found":
        return f"{key}.{name} is required and missing; it {rule}"
    default = getattr(field.get_default(), name, None) if field else None
    guess = nearest(str(context["tag"]), values)
    cure = f"did you mean {guess}?" if guess else f"the default is {default}" if default else "change it"
    return f"{key}.{name} {rule}, got {context['tag']!r}; {cure}"


def _rule(message: str) -> str:
    """A pydantic message as the end of a sentence about the key."""
    message = re.sub(r"^Input should ", "must ", message)
    message = re.sub(r", unable to parse.*$", "", message)
    message = re.sub(
        r"^must be a valid dictionary or (instance of \w+|object to extract fields from)$",
        "must be a mapping of keys",
        message,
    )
    message = re.sub(r"^(List|String) should (have .*?)( after validation, not \d+)?$", r"must \2", message)
    return message.replace("a valid ", "a ").replace("a integer", "an integer")
