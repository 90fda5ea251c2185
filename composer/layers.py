"""Policies put on top of each other. Where they come from is :mod:`composer.config`'s to know."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel

from composer.policy import AUTO, Cache, Candidate, Distributed, Policy, Worded

T = TypeVar("T", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Layer:
    """A part of the policy and its name in reports; only the fields that were set count."""

    name: str
    policy: Policy


@dataclass(frozen=True, slots=True)
class Rules:
    """The policy in force for one graph, and what holds for the process.

    Attributes:
        policy: What the layers add up to.
        layers: The layers that spoke, in order.
        origins: For each field that was set, the layer that did so last.
        cache: What is kept on disk.
        distributed: How ranks agree.
        names_chain: Whether the user wrote the chain, rather than taking the default or ``auto``.
        disregarded: The user's mistake, where ``COMPOSER_DISABLE`` has it disregarded.
    """

    policy: Policy
    layers: tuple[str, ...]
    origins: Mapping[str, str]
    cache: Cache
    distributed: Distributed
    names_chain: bool
    disregarded: str = ""


def merge(
    layers: Iterable[Layer],
    engines: Mapping[str, Mapping[str, Any]],
    installed: Callable[[], Iterable[str]] | None = None,
) -> Rules:
    """Put layers on top of each other, the last one first in line, field by field.

    Of a field that is a table, such as ``select``, a layer changes the keys that it gives.

    Args:
        layers: From the most general to the most particular.
        engines: Options of engines by name, behind those that a candidate itself gives.
        installed: Gives the engines that ``auto`` stands for; without it ``auto`` stays.
    """
    policy = Policy()
    origins: dict[str, str] = {}
    spoke: list[str] = []
    for layer in layers:
        policy = over(policy, layer.policy)
        given = layer.policy.model_fields_set
        origins |= dict.fromkeys(given, layer.name)
        spoke += [layer.name] if given else []
    named = "chain" in origins and all(each.backend != AUTO for each in policy.chain)
    chain = policy.chain if installed is None else _expanded(policy.chain, installed)
    chain = tuple(_with_options(each, engines) for each in chain)
    policy = policy.model_copy(update={"chain": chain})
    return Rules(policy, tuple(spoke), origins, Cache(), Distributed(), names_chain=named)


def _expanded(
    chain: tuple[Candidate, ...], installed: Callable[[], Iterable[str]]
) -> tuple[Candidate, ...]:
    """The chain with every installed engine in the place of ``auto``."""
    found = []
    for each in chain:
        names = installed() if each.backend == AUTO else ()
        found += [each.model_copy(update={"backend": name}) for name in names]
        found += [each] if each.backend != AUTO else []
    return tuple(found)


def over(base: T, top: T) -> T:
    """The fields of ``base``, and over them those that ``top`` was given; so with tables within."""
    given = {name: getattr(top, name) for name in top.model_fields_set}
    tables = {
        name: over(getattr(base, name), each)
        for name, each in given.items()
        if isinstance(each, Worded)
    }
    return base.model_copy(update=given | tables)


def _with_options(candidate: Candidate, engines: Mapping[str, Mapping[str, Any]]) -> Candidate:
    options = {**engines.get(candidate.name, {}), **candidate.options}
    return candidate.model_copy(update={"options": options})
