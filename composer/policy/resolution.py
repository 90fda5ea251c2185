"""The policy in force for one graph: layers found in all sources, merged field by field."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import BaseModel

from composer.errors import OptionError, UnknownNameError
from composer.policy.book import Source
from composer.policy.match import Facts
from composer.policy.model import AUTO, Candidate, Layer, Policy, check_mode, read_policy
from composer.policy.sources import books_of_contexts, file_in_force, in_force
from composer.policy.switches import disabled_layer, is_disabled, switches
from composer.policy.tables import Cache, Distributed, Verify, Worded

T = TypeVar("T", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Rules:
    """The policy in force for one graph, and the settings of the process.

    Attributes:
        policy: The merged policy.
        layers: The names of the layers that set a field, in order.
        origins: For each field that was set, the layer that set it last.
        cache: The settings of what is kept on disk.
        distributed: The settings of the agreement between ranks.
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


def resolve(
    graph: Facts,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    configured: Source = None,
    installed: Callable[[], Iterable[str]] | None = None,
) -> Rules:
    """Return the policy in force for one graph.

    Args:
        graph: The facts that policies match by.
        mode: ``torch.compile``'s mode.
        options: ``torch.compile``'s options: fields of :class:`composer.Policy`.
        configured: The argument of ``composer.configure``.
        installed: Returns the engines that ``chain = "auto"`` stands for. Without it ``auto`` is
            kept.

    Raises:
        OptionError: there are mistakes in a source; the error names all of them.
    """
    try:
        return _resolved(graph, mode, options, configured, installed)
    except OptionError as mistake:
        if not is_disabled():
            raise
        return dataclasses.replace(merge([disabled_layer()], {}), disregarded=str(mistake))


def _resolved(
    graph: Facts,
    mode: str | None,
    options: Mapping[str, Any] | None,
    configured: Source,
    installed: Callable[[], Iterable[str]] | None,
) -> Rules:
    own, book, last, inner, _ = _all_of(
        lambda: read_policy(options),
        lambda: in_force(configured),
        lambda: tuple(switches()),
        books_of_contexts,
        lambda: check_mode(mode),
    )
    file = file_in_force(configured) if book.backends else None
    option_tables = dict.fromkeys(book.backends, str(file or ""))
    models = (own.model, *(each.defaults.model for each in reversed(inner)))
    name = next(filter(None, models), "")  # the innermost that gives one
    graph = dataclasses.replace(graph, names=(*graph.names, name))
    layers = [*_layers_of_mode(mode), *book.layers(graph)]
    engines = dict(book.backends)
    cache, distributed = book.cache, book.distributed
    for each in inner:
        layers += [Layer("using", layer.policy) for layer in each.layers(graph)]
        for name, options in each.backends.items():
            engines[name] = engines.get(name, {}) | options
            option_tables.setdefault(name, "")
        cache, distributed = over(cache, each.cache), over(distributed, each.distributed)
    rules = merge([*layers, Layer("options", own), *last], engines, installed)
    store = os.environ.get("COMPOSER_VERDICT_STORE")
    if store:
        cache = cache.model_copy(update={"store": store})
    return dataclasses.replace(
        rules, cache=cache, distributed=distributed, option_tables=option_tables
    )


@contextmanager
def named_origin(layer: str, configured: Source) -> Iterator[None]:
    """Add the file or variable to errors about a chain or a list of passes raised within.

    If the program set the field, the traceback shows the place. A file or variable is not there.

    Args:
        layer: The layer that set the field.
        configured: The argument of ``composer.configure``.

    Raises:
        OptionError, UnknownNameError: the error raised within, with the place in front.
    """
    try:
        yield
    except (OptionError, UnknownNameError) as mistake:
        place = _place(layer, configured)
        if not place:
            raise
        raise type(mistake)(f"{place}: {mistake}") from mistake


def _place(layer: str, configured: Source) -> str:
    if layer.startswith("COMPOSER_"):
        return layer
    if not layer.startswith(("defaults", "models[")):
        return ""
    file = file_in_force(configured)
    return f"{file}: {layer}" if file else ""


def _layers_of_mode(mode: str | None) -> Iterator[Layer]:
    """Yield the layer of ``torch.compile``'s mode, if any; every other layer overrides it."""
    if mode == "max-autotune":
        yield Layer("mode", read_policy({"chain": AUTO, "select": "fastest"}))


def _all_of(*steps: Callable[[], Any]) -> list[Any]:
    """Return the results of the steps, or raise one error that names the mistakes of all."""
    results, mistakes = [], []
    for step in steps:
        try:
            results.append(step())
        except OptionError as mistake:
            mistakes.append(str(mistake))
    if mistakes:
        raise OptionError("; ".join(mistakes))
    return results
