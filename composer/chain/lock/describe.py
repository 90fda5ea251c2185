"""Makes a graph's entry in the lock while the graph is compiled; the engine is added later."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
from pydantic import BaseModel

from composer.backends.base import Backend
from composer.chain.lock.file import LockedGraph, LockedPass
from composer.graphs import keys
from composer.passes.base import GraphPass
from composer.passes.fingerprint import fields_of
from composer.passes.function import qualified_name
from composer.passes.resolve import SharedPasses
from composer.policy import Policy, Worded
from composer.records import GraphInput, GraphRequest
from composer.system import distribution
from composer.system.distribution import version_of

_READABLE = ("surroundings", "mode")
"""Parts of a graph's key that are short and stand in the lock as text; others as a digest."""


def describe(
    request: GraphRequest, policy: Policy, shared: SharedPasses, position: int
) -> LockedGraph:
    """Return the lock's entry of a captured graph, without the engine that serves it.

    Args:
        request: The graph as it was captured. torch's settings are read as they are now.
        policy: The policy in force for the graph.
        shared: The passes that the policy names.
        position: How many other graphs of its model were compiled before.
    """
    # Fields that say what follows a refusal, or how often calls are checked, are left out: they do
    # not decide which engine serves.
    usual = Policy()
    answers = ("strict", "on_exhausted", "on_pass_error", "on_runtime_error")
    unchecked = policy.verify.model_copy(update={"every": usual.verify.every})
    policy = policy.model_copy(
        update={name: getattr(usual, name) for name in answers} | {"verify": unchecked}
    )
    settings = {"mode": str(request.mode), "policy": policy.key, "passes": shared.key}
    parts = keys.parts_of(request, settings)
    inputs = keys.normalized("\n".join(map(_input, request.inputs)))
    return LockedGraph(
        model=request.model,
        position=position,
        engine="",
        key=request.graph_key,
        device=request.device,
        dtype=request.dtype,
        training=request.training,
        dynamic=request.dynamic,
        nodes=request.nodes,
        inputs=tuple(inputs.splitlines()),
        passes=_passes(shared),
        policy=_decisive(policy),
        parts={n: text if n in _READABLE else _digest(text) for n, text in parts.items()},
    )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _input(given: GraphInput) -> str:
    """``"x: float32[2, 8] on cpu"``."""
    if given.kind != "tensor":
        return f"{given.name}: {given.kind}"
    device = given.device.partition(":")[0]
    return f"{given.name}: {given.dtype}[{', '.join(map(str, given.shape))}] on {device}"


def _passes(shared: SharedPasses) -> tuple[LockedPass, ...]:
    listed = [_pass(each) for each in shared.passes]
    if shared.partitioner is not None:
        uuid = shared.partitioner.uuid()
        own = _digest(str(uuid)) if uuid else ""
        listed.append(LockedPass(name=qualified_name(shared.partitioner), fingerprint=own))
    return tuple(listed)


def _pass(each: GraphPass) -> LockedPass:
    fields = {f.name: getattr(each, f.name) for f in fields_of(each)}
    uuid = each.uuid()
    return LockedPass(
        name=each.name,
        parameters=readable({name: v for name, v in fields.items() if name != "name"}),
        fingerprint=_digest(uuid) if uuid else "",
    )


def _decisive(policy: Policy) -> dict[str, Any]:
    """Return the fields because of which this policy's key is not the default's, as readable."""
    usual = Policy()
    found = {}
    for name in Policy.model_fields:
        value, default = getattr(policy, name), getattr(usual, name)
        if value != default and policy.model_copy(update={name: default}).key != policy.key:
            found[name] = readable(value)
    return found


def readable(value: Any) -> Any:
    """Return a value in a form that TOML can hold and that is equal in every process."""
    if isinstance(value, Worded):
        return value.spelled
    if isinstance(value, BaseModel):
        given = readable(value.model_dump(exclude_defaults=True))
        return given["backend"] if given.keys() == {"backend"} else given
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return readable({f.name: getattr(value, f.name) for f in dataclasses.fields(value)})
    if isinstance(value, Mapping):
        return {str(key): readable(each) for key, each in sorted(value.items(), key=_by_name)}
    if isinstance(value, Set):
        return sorted(map(readable, value), key=str)
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [readable(each) for each in value]
    if isinstance(value, bool | int | float) and not isinstance(value, enum.Enum):
        return value
    named = callable(value) and not isinstance(value, str)
    return keys.without_address(qualified_name(value) if named else str(value))


def _by_name(item: tuple[Any, Any]) -> str:
    return str(item[0])


def versions_for(backend: Backend | None) -> dict[str, str]:
    """Return the versions of torch, composer and an engine's packages; "" if not installed."""
    packages = backend.packages if backend else ()
    return {name: version_here(name) for name in ("torch", distribution.NAME, *packages)}


def version_here(package: str) -> str:
    """Return a package's version in this process; torch's includes its build, as in "+cpu"."""
    return torch.__version__ if package == "torch" else version_of(package)
