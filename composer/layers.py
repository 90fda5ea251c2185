"""Merges the layers of a policy. :mod:`composer.config` finds the layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import BaseModel

from composer.policy import AUTO, Cache, Candidate, Distributed, Policy, Verify, Worded

T = TypeVar("T", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Layer:
    """A partial policy and its name in reports; only the fields that were set count."""

    name: str
    policy: Policy


@dataclass(frozen=True, slots=True)
class Rules:
    """The policy in force for one graph, and the settings of the process.

    Attributes:
        policy: The merged policy.
        layers: The names of the layers that set a field, in order.
        origins: For each field that was set, the layer that set it last.
        cache: The settings of what is kept on disk.
        distributed: The settings of the leader's decision among ranks.
        names_chain: True if the user wrote the chain. False for the default or ``auto``.
        option_tables: The engines that have a table of options, each with the policy file that has
            it; empty if no file has it.
        disregarded: The user's mistake that is ignored because of ``COMPOSER_DISABLE``; else empty.
    """

    policy: Policy
    layers: tuple[str, ...]
    origins: Mapping[str, str]
    cache: Cache
    distributed: Distributed
    names_chain: bool
    option_tables: Mapping[str, str] = field(default_factory=dict)
    disregarded: str = ""


def merge(
    layers: Iterable[Layer],
    engines: Mapping[str, Mapping[str, Any]],
    installed: Callable[[], Iterable[str]] | None = None,
) -> Rules:
    """Merge layers field by field; a later layer takes precedence.

    In a field that is a table, such as ``select``, a layer replaces only the keys that it gives.

    Args:
        layers: The layers, from the most general to the most specific.
        engines: Options of engines by name. A candidate's own options take precedence.
        installed: Returns the engines that ``auto`` stands for. Without it ``auto`` is kept.
    """
    policy = Policy()
    origins: dict[str, str] = {}
    names: list[str] = []
    for layer in layers:
        policy = over(policy, layer.policy)
        fields = layer.policy.model_fields_set
        if fields:
            names.append(layer.name)
            origins |= dict.fromkeys(fields, layer.name)
    names_chain = "chain" in origins and all(each.backend != AUTO for each in policy.chain)
    chain = policy.chain if installed is None else _without_auto(policy.chain, installed)
    chain = tuple(_with_options(each, engines) for each in chain)
    verify = _verify_where_composer_chooses(policy)
    policy = policy.model_copy(update={"chain": chain, "verify": verify})
    return Rules(policy, tuple(names), origins, Cache(), Distributed(), names_chain=names_chain)


def _verify_where_composer_chooses(policy: Policy) -> Verify:
    """Return when numbers are compared: where composer chooses the engine, ``compile`` by default.

    Eager has run for the measurement anyway. A chain that the user wrote is taken as it is.
    """
    is_auto = any(each.backend == AUTO for each in policy.chain)
    chooses = is_auto or policy.select.by == "fastest"
    if "when" in policy.verify.model_fields_set or not chooses:
        return policy.verify
    return over(policy.verify, Verify(when="compile"))


def _without_auto(
    chain: tuple[Candidate, ...], installed: Callable[[], Iterable[str]]
) -> tuple[Candidate, ...]:
    """Return the chain with ``auto`` replaced by all installed engines."""
    candidates = []
    for candidate in chain:
        if candidate.backend == AUTO:
            names = installed()
            candidates += [candidate.model_copy(update={"backend": name}) for name in names]
        else:
            candidates.append(candidate)
    return tuple(candidates)


def over(base: T, top: T) -> T:
    """Return ``base`` with the fields that ``top`` sets; nested tables are merged likewise."""
    fields = {}
    for name in top.model_fields_set:
        value = getattr(top, name)
        if isinstance(value, Worded):
            value = over(getattr(base, name), value)
        fields[name] = value
    return base.model_copy(update=fields)


def _with_options(candidate: Candidate, engines: Mapping[str, Mapping[str, Any]]) -> Candidate:
    options = {**engines.get(candidate.name, {}), **candidate.options}
    return candidate.model_copy(update={"options": options})
