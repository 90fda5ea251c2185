"""Checks what a pass declares: its fields, name and stage, and that ``uuid`` covers its fields."""

from __future__ import annotations

import copy
import dataclasses
import enum
import inspect
import itertools
from typing import Any, cast

import torch

from composer.errors import PassError, class_and_text
from composer.passes.base import GraphPass
from composer.passes.debug.watch import Findings
from composer.passes.digests import classes_below, fields_of
from composer.passes.function import FunctionPass
from composer.passes.resolve import annotated
from composer.records import Stage
from composer.system import control_flow


def examine(each: GraphPass, findings: Findings) -> None:
    """Add every rule that the pass's declaration breaks to ``findings``."""
    for rule, objection in (("name", _name), ("stage", _stage), ("dataclass", _fields)):
        found = objection(each)
        if found:
            findings.broke(PassError(each.name, rule, found))
    try:
        _examine_uuid(each, findings)
    except BaseException as error:  # noqa: BLE001  # becomes the rule that was broken
        control_flow.pass_on(error)
        broken = PassError(each.name, "uuid", f"it raises {class_and_text(error)}")
        broken.__cause__ = error
        findings.broke(broken)
    try:
        inspect.getsource(type(each))
    except (OSError, TypeError):
        findings.advise("its source is not found; its uuid differs from one Python to the next")


def _name(each: GraphPass) -> str:
    is_text = isinstance(each.name, str) and each.name.strip()
    return "" if is_text else f"the name is {each.name!r}"


def _stage(each: GraphPass) -> str:
    known = [stage.value for stage in Stage]
    return "" if each.stage in known else f"the stage is {each.stage!r}, not one of {known}"


def _fields(each: GraphPass) -> str:
    fields = {field.name for field in fields_of(each)}
    names = itertools.chain.from_iterable(map(annotated, classes_below(type(each), GraphPass)))
    lost = [name for name in names if name not in fields]
    return f"it annotates {', '.join(lost)} and is not decorated with @dataclass" if lost else ""


def _examine_uuid(each: GraphPass, findings: Findings) -> None:
    uuid = each.uuid()
    if uuid is None:
        findings.advise("it has no uuid, so Inductor's caches are bypassed where it is listed")
        return
    if each.uuid() != uuid or copy.copy(each).uuid() != uuid:
        findings.broke(PassError(each.name, "uuid", "an equal pass has another uuid"))
    if isinstance(each, FunctionPass):
        return
    for field in fields_of(each):
        other = _other_value(getattr(each, field.name))
        changed = None if other is None else _replaced(each, field.name, other)
        if changed is None:
            findings.advise(f"whether its uuid covers {field.name!r} was not tried")
        elif changed.uuid() == uuid:
            what = f"it is the same for {field.name} = {other!r}"
            findings.broke(PassError(each.name, "uuid", what))


def _replaced(each: GraphPass, name: str, value: Any) -> GraphPass | None:
    """Return the pass with another value of a field; ``None`` if it does not take that value."""
    try:
        return cast(GraphPass, dataclasses.replace(cast(Any, each), **{name: value}))
    except Exception:  # noqa: BLE001  # a pass may check its fields
        return None


def _other_value(value: Any) -> Any:
    """Return another value of the same type, or ``None`` for types that it does not know."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, enum.Enum):
        others = [member for member in type(value) if member is not value]
        return next(iter(others), None)
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str):
        return f"{value}_"
    if isinstance(value, tuple):
        return (*value, "other")
    if isinstance(value, torch.dtype):
        return torch.float64 if value is torch.float32 else torch.float32
    return None
