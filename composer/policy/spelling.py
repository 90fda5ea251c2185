"""Policies as a file spells them."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from composer.policy.model import Candidate
from composer.policy.tables import Worded


@functools.singledispatch
def spelled(value: Any) -> Any:
    """Return a value as in a policy file; an object of code becomes ``"module:name"``."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
        return {"pass": spelled(type(value)), **spelled(fields)}
    name = getattr(value, "__name__", type(value).__qualname__)
    return f"{value.__module__}:{getattr(value, '__qualname__', name)}"


@spelled.register(str)
@spelled.register(int)
@spelled.register(float)
@spelled.register(types.NoneType)
def _as_it_is(value: str | float | None) -> Any:
    return value


@spelled.register
def _candidate(value: Candidate) -> Any:
    rest = spelled({name: getattr(value, name) for name in value.model_fields_set})
    return rest | {"backend": spelled(value.backend)}


@spelled.register
def _worded(value: Worded) -> Any:
    return value.spelled


@spelled.register
def _model(value: BaseModel) -> Any:
    return value.model_dump(exclude_defaults=True)


@spelled.register(Mapping)
def _mapping(value: Mapping[Any, Any]) -> Any:
    return {key: spelled(each) for key, each in value.items()}


@spelled.register(list)
@spelled.register(tuple)
def _sequence(value: Sequence[Any]) -> Any:
    return [*map(spelled, value)]
