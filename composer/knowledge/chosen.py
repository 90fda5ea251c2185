"""Makes a graph's entry in the lock while the graph is compiled; the engine is added later."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import torch
from pydantic import BaseModel

from composer.graphs import keys
from composer.knowledge.lock_file import LockedGraph, LockedPass
from composer.passes.base import GraphPass
from composer.passes.digests import fields_of
from composer.passes.function import qualified_name
from composer.passes.resolve import SharedPasses
from composer.policy import Policy, Worded
from composer.records import GraphInput, GraphRequest
from composer.system import distribution
from composer.system.distribution import version_of

_READABLE = ("surroundings", "mode")
"""Parts of a graph's key that are short and stand in the lock as text; others as a digest."""

_AFTER_A_REFUSAL = ("strict", "on_exhausted", "on_pass_error", "on_runtime_error")


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
    defaults: dict[str, Any] = {name: getattr(usual, name) for name in _AFTER_A_REFUSAL}
    defaults["verify"] = policy.verify.model_copy(update={"every": usual.verify.every})
    policy = policy.model_copy(update=defaults)
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


def _input(described: GraphInput) -> str:
    """Return an input as text: ``"x: float32[2, 8] on cpu"``."""
    if described.kind != "tensor":
        return f"{described.name}: {described.kind}"
    device, shape = described.device.partition(":")[0], ", ".join(map(str, described.shape))
    return f"{described.name}: {described.dtype}[{shape}] on {device}"


def _passes(shared: SharedPasses) -> tuple[LockedPass, ...]:
    listed = list(map(_pass, shared.passes))
    if shared.partitioner is not None:
        name, fingerprint = qualified_name(shared.partitioner), _fingerprint(shared.partitioner)
        listed.append(LockedPass(name=name, fingerprint=fingerprint))
    return tuple(listed)


def _pass(each: GraphPass) -> LockedPass:
    fields = {field.name: getattr(each, field.name) for field in fields_of(each)}
    fields.pop("name", None)
    return LockedPass(name=each.name, parameters=readable(fields), fingerprint=_fingerprint(each))


def _fingerprint(rewrite: Any) -> str:
    """Return a digest of the uuid of a pass or partitioner; empty if it has none."""
    uuid = rewrite.uuid()
    return _digest(str(uuid)) if uuid else ""


def _decisive(policy: Policy) -> dict[str, Any]:
    """Return the fields because of which this policy's key is not the default's, as readable."""
    usual = Policy()
    found = {}
    for name in Policy.model_fields:
        without = policy.model_copy(update={name: getattr(usual, name)})
        if without.key != policy.key:
            found[name] = readable(getattr(policy, name))
    return found


def readable(value: Any) -> Any:
    """Return a value in a form that TOML can hold and that is equal in every process."""
    if isinstance(value, str | bytes | enum.Enum):
        return keys.without_address(str(value))
    if isinstance(value, bool | int | float):
        return value
    if isinstance(value, Worded):
        return value.spelled
    if isinstance(value, BaseModel):
        fields = readable(value.model_dump(exclude_defaults=True))
        return fields["backend"] if fields.keys() == {"backend"} else fields
    if isinstance(value, Mapping):
        by_name = {str(key): readable(each) for key, each in value.items()}
        return {name: by_name[name] for name in sorted(by_name)}
    if isinstance(value, Set):
        return sorted(map(readable, value), key=str)
    if isinstance(value, Sequence):
        return list(map(readable, value))
    if isinstance(value, type):
        return keys.without_address(qualified_name(value))
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return readable({field.name: getattr(value, field.name) for field in fields})
    return keys.without_address(qualified_name(value) if callable(value) else str(value))


def versions_with(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of torch, composer and the packages; "" for one that is not installed."""
    return {name: version_here(name) for name in ("torch", distribution.NAME, *packages)}


def version_here(package: str) -> str:
    """Return a package's version in this process; torch's includes its build, as in "+cpu"."""
    return torch.__version__ if package == "torch" else version_of(package)
