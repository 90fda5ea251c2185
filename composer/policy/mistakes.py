"""Finds unknown names in a policy before anything is compiled: engines, their options, passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from composer.backends import find_backend
from composer.errors import ComposerError
from composer.passes.resolve import shared_passes
from composer.policy.model import AUTO, Candidate, Policy, PolicyBook, names_code
from composer.policy.wording import Location, path_of

Mistake = tuple[Location, ComposerError]


def refuse_mistakes(book: PolicyBook, where: str = "") -> None:
    """Raise one error that names every unknown name. It does not import code of the user.

    Args:
        book: The policies.
        where: The file that they are from, to begin each sentence of the error with.

    Raises:
        OptionError, UnknownNameError: there are mistakes.
    """
    found = list(mistakes(book, imports=False))
    if not found:
        return
    sentences = [f"{where}{path_of(_table(location))}: {error}" for location, error in found]
    _, first = found[0]
    raise type(first)("; ".join(sentences))


def mistakes(book: PolicyBook, *, imports: bool) -> Iterator[Mistake]:
    """Yield the place of each unknown name, and the error that describes it.

    Args:
        book: The policies.
        imports: True to import the code of ``module:name``, too, and to check it.
    """
    tables: dict[Location, Policy] = {("defaults",): book.defaults}
    tables |= {("models", index): rule for index, rule in enumerate(book.models)}
    for table, policy in tables.items():
        chain = policy.chain if "chain" in policy.model_fields_set else ()
        for place, candidate in enumerate(chain):
            if imports or not names_code(candidate.backend):
                yield from _mistakes_of_candidate((*table, "chain", place), candidate)
        yield from _mistakes_of_passes(table, policy, imports=imports)
    for name, options in book.backends.items():
        candidate = Candidate(backend=name, options=options)
        yield from _mistakes_of_candidate(("backends", name), candidate)


def _table(location: Location) -> Location:
    """Return the part of a location that names a table of the file."""
    return location[:2] if location[0] in ("models", "backends") else location[:1]


def _mistakes_of_candidate(location: Location, candidate: Candidate) -> Iterator[Mistake]:
    """Check the engine and its options."""
    if candidate.backend == AUTO:
        return
    try:
        backend = find_backend(candidate.backend)
    except ComposerError as error:
        yield (*location, candidate.name), error
        return
    options = {(*location, name): (name, value) for name, value in candidate.options.items()}
    yield from _mistakes_of(location, options, lambda right: backend.check_options(dict(right)))


def _mistakes_of_passes(table: Location, policy: Policy, *, imports: bool) -> Iterator[Mistake]:
    listed: dict[Location, Any] = {}
    for place, entry in enumerate(policy.passes):
        name = entry.get("pass") if isinstance(entry, dict) else entry
        if imports or not names_code(name):
            listed[*table, "passes", place, str(name)] = entry
    check = partial(shared_passes, on_error=policy.on_pass_error)
    yield from _mistakes_of((*table, "passes"), listed, check)


def _mistakes_of(
    whole: Location, parts: Mapping[Location, Any], check: Callable[[list[Any]], object]
) -> Iterator[Mistake]:
    """Check each part alone, and the right parts together."""
    right = []
    for location, part in parts.items():
        try:
            check([part])
            right.append(part)
        except ComposerError as error:
            yield location, error
    try:
        check(right)
    except ComposerError as error:
        yield whole, error
