"""Base of every config model: frozen, no unknown keys. Models live beside their owners."""

from pydantic import BaseModel, ConfigDict


class ConfigModel(BaseModel):
    """A frozen node of a run's config tree; every field has a description and its default only here."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, use_attribute_docstrings=True, allow_inf_nan=False
    )
