"""The policy in force for one graph: layers found in all sources, merged field by field."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel

from composer import _torch
from composer.errors import OptionError, UnknownNameError
from composer.policy.model import AUTO, Candidate, Layer, Policy, PolicyBook, Source, read_policy
from composer.policy.sources import books_of_contexts, in_force
from composer.policy.switches import disabled_layer, is_disabled, switched, switches
from composer.policy.tables import Cache, Distributed, Facts, Verify, Worded
from composer.records import ForLock
from composer.registry import did_you_mean

if TYPE_CHECKING:
    from composer.chain.candidates import ChainEntry
    from composer.passes.pipeline import OnError
    from composer.passes.resolve import SharedPasses

T = TypeVar("T", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Finders:
    """The functions that find what a policy names. Engines and passes stand above this package.

    Attributes:
        refuse_slip: Refuses the name of an engine that is almost a known one.
        entries: Returns the candidates of a policy's chain, each with its engine.
        passes: Returns the passes that a policy lists.
        installed: Returns the engines that ``chain = "auto"`` stands for. Without it ``auto`` is
            kept.
    """

    refuse_slip: Callable[[str], None]
    entries: Callable[[Policy, Cache], tuple[ChainEntry, ...]]
    passes: Callable[[Sequence[Any], OnError], SharedPasses]
    installed: Callable[[], Iterable[str]] | None = None


@dataclass(frozen=True, slots=True)
class Resolved:
    """All that holds for one graph: the policy in force, and what its names stand for.

    Attributes:
        policy: The merged policy.
        entries: The candidates of its chain, each with its engine and its limits.
        shared: The passes that it lists.
        cache: The settings of what is kept on disk.
        distributed: The settings of the leader's decision among ranks.
        layers: The names of the layers that set a field, in order.
        origins: For each field that was set, the layer that set it last.
        names_chain: True if the user wrote the chain. False for the default or ``auto``.
        disregarded: The user's mistake that is ignored because of ``COMPOSER_DISABLE``; else empty.
        lock: What ``composer.lock`` would hold of the graph; ``None`` before that is known.
    """

    policy: Policy
    entries: tuple[ChainEntry, ...]
    shared: SharedPasses
    cache: Cache
    distributed: Distributed
    layers: tuple[str, ...]
    origins: Mapping[str, str]
    names_chain: bool
    disregarded: str = ""
    lock: ForLock | None = None

    @property
    def builds_apart(self) -> bool:
        """True if a sandbox may build a whole candidate before this process does."""
        select = self.policy.select
        foreign = [each for each in self.entries if not each.is_torchs]
        if select.background:
            return True
        if select.by == "fastest" and foreign:
            return not any(each.stays_here for each in self.entries)
        apart = (each for each in self.entries if each.limits.isolate and not each.is_fallback)
        return not all(each.backend.isolates_itself for each in apart)


def resolve(
    graph: Facts,
    finders: Finders,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    configured: Source = None,
) -> Resolved:
    """Return all that holds for one graph.

    Args:
        graph: The facts that policies match by.
        finders: The functions that find the engines and passes that the policy names.
        mode: ``torch.compile``'s mode.
        options: ``torch.compile``'s options: fields of :class:`composer.Policy`.
        configured: The argument of ``composer.configure``.

    Raises:
        OptionError: there are mistakes in a source; the error names all of them.
        OptionError, UnknownNameError: there are mistakes in the names of the merged policy. The
            error names all of them, with the file or variable of each.
    """
    try:
        return _resolved(graph, finders, mode, options, configured)
    except (OptionError, UnknownNameError) as mistake:
        if not is_disabled():
            raise
        off = _looked_up([disabled_layer()], [], None, finders)
        return dataclasses.replace(off, disregarded=str(mistake))


def _resolved(
    graph: Facts,
    finders: Finders,
    mode: str | None,
    options: Mapping[str, Any] | None,
    configured: Source,
) -> Resolved:
    own, (book, file), last, _, *inner = all_of(
        lambda: read_policy(options),
        lambda: in_force(configured),
        lambda: tuple(switches()),
        lambda: _check_mode(mode),
        *books_of_contexts(),
    )
    models = (own.model, *(each.defaults.model for each in reversed(inner)))
    name = next(filter(None, models), "")  # the innermost that gives one
    graph = dataclasses.replace(graph, names=(*graph.names, name))
    layers = [*_layers_of_mode(mode), *_layers_of(book, graph)]
    for each in inner:
        layers += [Layer("using", layer.policy) for layer in _layers_of(each, graph)]
    layers += [Layer("options", own), *last]
    return _looked_up(layers, [book, *inner], file, finders)


def _looked_up(
    layers: Sequence[Layer], books: Sequence[PolicyBook], file: Path | None, finders: Finders
) -> Resolved:
    """Merge the layers, and look up what the merged policy names.

    The books are the one in force, which is from ``file`` if that is not ``None``, and those of
    the contexts. They have what holds for the process.
    """
    cache = Cache()
    distributed = Distributed()
    engines: dict[str, dict[str, Any]] = {}
    for book in books:
        cache = over(cache, book.cache)
        distributed = over(distributed, book.distributed)
        for name, options in book.backends.items():
            engines[name] = engines.get(name, {}) | options
    cache = switched(cache)
    policy = merge(layers)
    origins = {field: each.name for each in layers for field in each.policy.model_fields_set}
    names_chain = "chain" in origins and all(each.backend != AUTO for each in policy.chain)
    candidates = _without_auto(policy.chain, finders.installed)
    chain = tuple(_with_options(each, engines) for each in candidates)
    policy = policy.model_copy(update={"chain": chain})
    passes = partial(finders.passes, policy.passes, policy.on_pass_error)
    entries, shared, *_ = all_of(
        partial(_at, _origin("chain", origins, file), partial(finders.entries, policy, cache)),
        partial(_at, _origin("passes", origins, file), passes),
        *_slips(books, file, finders),
    )
    return Resolved(
        policy=policy,
        entries=entries,
        shared=shared,
        cache=cache,
        distributed=distributed,
        layers=tuple(each.name for each in layers if each.policy.model_fields_set),
        origins=origins,
        names_chain=names_chain,
    )


def merge(layers: Iterable[Layer]) -> Policy:
    """Return the policy of the layers, field by field; a later layer takes precedence.

    In a field that is a table, such as ``select``, a layer replaces only the keys that it gives.
    """
    policy = Policy()
    for layer in layers:
        policy = over(policy, layer.policy)
    return policy.model_copy(update={"verify": _verify_where_composer_chooses(policy)})


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
    chain: tuple[Candidate, ...], installed: Callable[[], Iterable[str]] | None
) -> Iterator[Candidate]:
    """Yield the candidates, with ``auto`` replaced by all installed engines."""
    for candidate in chain:
        if candidate.backend == AUTO and installed is not None:
            for name in installed():
                yield candidate.model_copy(update={"backend": name})
        else:
            yield candidate


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


def _check_mode(mode: str | None) -> None:
    """Check that the installed torch knows a mode of ``torch.compile``.

    Raises:
        OptionError: it does not.
    """
    if mode is None:
        return
    known = _torch.inductor.modes()
    if mode not in known:
        guess = did_you_mean(mode, known)
        raise OptionError(f"unknown mode {mode!r}{guess} (accepted: {', '.join(known)})")


def _layers_of_mode(mode: str | None) -> Iterator[Layer]:
    """Yield the layer of ``torch.compile``'s mode, if any; every other layer overrides it."""
    if mode == "max-autotune":
        yield Layer("mode", read_policy({"chain": AUTO, "select": "fastest"}))


def _layers_of(book: PolicyBook, graph: Facts) -> Iterator[Layer]:
    """Yield the layers of a book that hold for a graph, in order."""
    yield Layer("defaults", book.defaults)
    for index, rule in enumerate(book.models):
        if rule.match.holds(graph):
            fields = {name: getattr(rule, name) for name in rule.model_fields_set - {"match"}}
            yield Layer(f"models[{index}]", Policy.model_construct(set(fields), **fields))


def _slips(
    books: Sequence[PolicyBook], file: Path | None, finders: Finders
) -> Iterator[Callable[[], None]]:
    """Yield the checks of the names of tables. A misspelled one would be ignored in silence."""
    for book in books:
        where = f"{file}: table 'backends'" if file and book is books[0] else "table 'backends'"
        for name in book.backends:
            yield partial(_at, where, partial(finders.refuse_slip, name))


def _origin(field: str, origins: Mapping[str, str], file: Path | None) -> str:
    """Return the file or variable that set a field; empty if the program did.

    The traceback shows the place in a program. A file or variable is not in it.
    """
    layer = origins.get(field, "")
    if layer.startswith("COMPOSER_"):
        return layer
    return f"{file}: {layer}" if file and layer.startswith(("defaults", "models[")) else ""


def _at(where: str, find: Callable[[], Any]) -> Any:
    """Return what is found; put the place in front of a mistake, if there is one."""
    try:
        return find()
    except (OptionError, UnknownNameError) as mistake:
        if not where:
            raise
        raise type(mistake)(f"{where}: {mistake}") from mistake


def all_of(*steps: Callable[[], Any]) -> list[Any]:
    """Return the results of the steps, or raise one error that names the user's mistakes in all."""
    results: list[Any] = []
    mistakes: list[OptionError | UnknownNameError] = []
    for step in steps:
        try:
            results.append(step())
        except (OptionError, UnknownNameError) as mistake:
            mistakes.append(mistake)
    if len(mistakes) > 1:
        raise type(mistakes[0])("; ".join(map(str, mistakes)))
    if mistakes:
        raise mistakes[0]
    return results
