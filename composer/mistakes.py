"""The names in a policy that nobody knows: engines, their options, passes."""

from __future__ import annotations

from collections.abc import Iterator

from composer.backends import find_backend, names_code
from composer.config import PolicyBook
from composer.errors import ComposerError
from composer.passes.resolve import shared_passes
from composer.policy import AUTO, Candidate, Policy
from composer.wording import Location, path_of


def refuse_mistakes(book: PolicyBook, where: str = "") -> None:
    """Find unknown names before anything is compiled. Code of the user's is not imported for it.

    Args:
        book: The policies.
        where: The file that they are from, for the message.

    Raises:
        OptionError, UnknownNameError: naming every mistake.
    """
    found = list(mistakes(book, imports=False))
    told = (f"{where}{path_of(_table(location))}: {error}" for location, error in found)
    if found:
        raise type(found[0][1])("; ".join(told))


def mistakes(book: PolicyBook, *, imports: bool) -> Iterator[tuple[Location, ComposerError]]:
    """Each unknown name, and where it stands.

    Args:
        book: The policies.
        imports: Whether ``module:name`` is imported, and looked at as well.
    """
    tables: dict[Location, Policy] = {("defaults",): book.defaults}
    tables |= {("models", index): rule for index, rule in enumerate(book.models)}
    for table, policy in tables.items():
        chain = policy.chain if "chain" in policy.model_fields_set else ()
        for place, candidate in enumerate(chain):
            if imports or not names_code(candidate.backend):
                yield from _of_candidate((*table, "chain", place), candidate)
        yield from _of_passes(table, policy, imports=imports)
    for name, options in book.backends.items():
        yield from _of_candidate(("backends", name), Candidate(backend=name, options=options))


def _table(location: Location) -> Location:
    return location[:2] if location[0] in ("models", "backends") else location[:1]


def _of_candidate(
    place: Location, candidate: Candidate
) -> Iterator[tuple[Location, ComposerError]]:
    if candidate.backend == AUTO:
        return
    try:
        backend = find_backend(candidate.backend)
    except ComposerError as error:
        yield (*place, candidate.name), error
        return
    alone = {}
    for name, value in candidate.options.items():
        try:
            backend.check_options({name: value})
        except ComposerError as error:
            yield (*place, name), error
        else:
            alone[name] = value
    try:
        backend.check_options(alone)  # those that do not go together
    except ComposerError as error:
        yield place, error


def _of_passes(
    table: Location, policy: Policy, *, imports: bool
) -> Iterator[tuple[Location, ComposerError]]:
    named = [each.get("pass") if isinstance(each, dict) else each for each in policy.passes]
    known = []
    for place, (name, each) in enumerate(zip(named, policy.passes, strict=True)):
        if names_code(name) and not imports:
            continue
        try:
            shared_passes((each,), policy.on_pass_error)
        except ComposerError as error:
            yield (*table, "passes", place, str(name)), error
        else:
            known.append(each)
    try:
        shared_passes(tuple(known), policy.on_pass_error)
    except ComposerError as error:
        yield (*table, "passes"), error
