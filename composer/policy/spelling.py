"""Policies as a file spells them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from composer.policy.model import Candidate
from composer.policy.tables import Worded


def spelled(value: Any) -> Any:
    """Return a value as in a policy file; an object of code becomes ``"module:name"``."""
    if isinstance(value, Candidate):
        rest = spelled({name: getattr(value, name) for name in value.model_fields_set})
        return rest | {"backend": spelled(value.backend)}
    if isinstance(value, Worded):
        return value.spelled
    if isinstance(value, BaseModel):
        return value.model_dump(exclude_defaults=True)
    if isinstance(value, Mapping):
        return {key: spelled(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return list(map(spelled, value))
    if isinstance(value, str | int | float | None):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
        return {"pass": spelled(type(value)), **spelled(fields)}
    name = getattr(value, "__name__", type(value).__qualname__)
    return f"{value.__module__}:{getattr(value, '__qualname__', name)}"
