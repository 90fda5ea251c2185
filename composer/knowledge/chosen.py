"""The candidate that serves a graph: an entry of ``composer.lock``.

It is found in the lock only, and only where the policy has ``locked``. In a process that is not
locked, who serves is decided anew for each compile, so nothing is kept in memory or on disk.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
from collections.abc import Mapping, Sequence, Set
from typing import Any, ClassVar, Literal

import torch
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, StrictBool, StrictInt

from composer.graphs import keys
from composer.knowledge.facts import Fact, now
from composer.knowledge.fingerprint import Fingerprint
from composer.passes.base import GraphPass
from composer.passes.digests import values_of
from composer.passes.function import qualified_name
from composer.passes.resolve import SharedPasses
from composer.policy import Policy, Worded
from composer.records import (
    CompileReport,
    ForLock,
    GraphInput,
    GraphRequest,
    in_precision,
    spelled,
)
from composer.system.disk import this_process
from composer.system.distribution import version_of

_READABLE = ("surroundings", "mode")
"""Parts of a graph's key that are short and stand in the lock as text; others as a digest."""

_AFTER_A_REFUSAL = ("strict", "on_exhausted", "on_pass_error", "on_runtime_error")


class LockedPass(BaseModel):
    """A shared pass: its name, its parameters, and the digest of its source and parameters."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    parameters: dict[str, Any] = Field(default_factory=dict)
    fingerprint: str = ""


class Chosen(Fact):
    """A graph and the candidate that serves it. Its fields are the keys of the file.

    Attributes:
        model: Class or function, or the name that the policy gives it.
        position: How many other graphs of that model were compiled before it.
        engine: The engine, as the chain spells it; ``eager`` for the eager fallback, and empty if
            nobody serves.
        key: The ``graph_key`` of its report.
        device: The most common device.
        dtype: The most common floating dtype.
        training: True if it was compiled for training.
        dynamic: True if some size is a symbol.
        nodes: The number of operations.
        inputs: The inputs except weights, each as text.
        passes: The shared passes, in order.
        options: The engine's options, as the chain gave them.
        precision: The precision of the engine; empty if it is the graph's own.
        policy: The fields of the policy that affect how the graph is compiled and are not the
            default.
        parts: The parts of the graph's key, each as text or digest. Graphs with equal parts are the
            same graph.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: ClassVar[str] = "chosen"
    noun: ClassVar[str] = "entry of composer.lock"
    depends_on: ClassVar[tuple[str, ...]] = ("named_parts",)

    learnt: AwareDatetime = Field(default_factory=now, exclude=True)
    process: str = Field(default_factory=this_process, exclude=True)
    model: str
    position: StrictInt = Field(ge=0)
    engine: str
    key: str
    device: str
    dtype: str
    training: StrictBool
    dynamic: StrictBool
    nodes: StrictInt
    inputs: tuple[str, ...]
    passes: tuple[LockedPass, ...] = ()
    options: dict[str, Any] = Field(default_factory=dict)
    precision: Literal["", "bf16", "int8"] = ""
    policy: dict[str, Any] = Field(default_factory=dict)
    parts: dict[str, str]

    @staticmethod
    def of(graph: GraphRequest | CompileReport, rest: ForLock, position: int = 0) -> Chosen:
        """Return the entry of a graph, without the candidate that serves it.

        Args:
            graph: The captured graph, or its record.
            rest: What the entry holds besides.
            position: How many other graphs of its model were compiled before.
        """
        inputs = keys.normalized("\n".join(map(_input, graph.inputs)))
        return Chosen(
            model=graph.model,
            position=position,
            engine="",
            key=graph.graph_key,
            device=graph.device,
            dtype=graph.dtype,
            training=graph.training,
            dynamic=graph.dynamic,
            nodes=graph.nodes,
            inputs=tuple(inputs.splitlines()),
            passes=tuple(map(LockedPass.model_validate, rest.passes)),
            policy=rest.policy,
            parts=rest.parts,
        )

    def is_about(self, fingerprint: Fingerprint) -> bool:
        """Return False if it is about another graph, or about another policy or other passes."""
        return self.parts == fingerprint.named_parts

    def sentence(self) -> str:
        """Return the candidate as text: ``"onnxrt(threads=2) in bf16"``."""
        engine = spelled(self.engine, self.options) if self.engine else "nobody"
        return in_precision(engine, self.precision)

    @property
    def server(self) -> dict[str, Any]:
        """The engine, its options and its precision."""
        return {"engine": self.engine, "options": self.options, "precision": self.precision}

    @property
    def title(self) -> str:
        """``"graph 0 of my_package.Net"``."""
        return f"graph {self.position} of {self.model}"


def for_lock(
    request: GraphRequest,
    policy: Policy,
    shared: SharedPasses,
    versions: dict[str, dict[str, str]],
) -> ForLock:
    """Return what the lock holds of a captured graph and its record has nowhere else.

    Args:
        request: The graph as it was captured. torch's settings are read as they are now.
        policy: The policy in force for the graph.
        shared: The passes that the policy names.
        versions: The versions of the packages of each candidate.
    """
    # Fields that say what follows a refusal, or how often calls are checked, are left out: they do
    # not decide which engine serves.
    usual = Policy()
    defaults: dict[str, Any] = {name: getattr(usual, name) for name in _AFTER_A_REFUSAL}
    defaults["verify"] = policy.verify.model_copy(update={"every": usual.verify.every})
    policy = policy.model_copy(update=defaults)
    settings = {"mode": str(request.mode), "policy": policy.key, "passes": shared.key}
    parts = keys.parts_of(request, settings)
    return ForLock(
        parts={n: text if n in _READABLE else _digest(text) for n, text in parts.items()},
        passes=tuple(each.model_dump(exclude_defaults=True) for each in _passes(shared)),
        policy=_decisive(policy),
        versions=versions,
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
    fields = values_of(each)
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
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return readable(values_of(value))
    return keys.without_address(qualified_name(value) if callable(value) else str(value))


def version_here(package: str) -> str:
    """Return a package's version in this process; torch's includes its build, as in "+cpu"."""
    return torch.__version__ if package == "torch" else version_of(package)
