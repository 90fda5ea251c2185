"""Tables from names to values: imported at first use, extended by entry points, no duplicates."""

from __future__ import annotations

import difflib
import functools
import logging
import pkgutil
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar, cast

from composer.errors import ComposerError, UnknownNameError

T = TypeVar("T")

log = logging.getLogger("composer")


@dataclass(frozen=True)
class Registry(Generic[T]):
    """A table from names to values, which are imported when they are needed.

    Attributes:
        kind: The kind of the values, for messages, such as "backend".
        own: Composer's own names, each with its ``"module:attribute"``.
        group: The entry-point group by which other packages add names.
    """

    kind: str
    own: Mapping[str, str]
    group: str | None = None

    def names(self) -> tuple[str, ...]:
        """Return all names, those of other packages included, sorted."""
        return tuple(sorted(self._table))

    def __contains__(self, name: str) -> bool:
        return name in self._table

    def get(self, name: str) -> T:
        """Import and return the value of a name.

        Raises:
            UnknownNameError: the name is not registered.
            ComposerError: two other packages register it for different values.
        """
        _, clashes = self._discovered
        if name in clashes:
            raise ComposerError(clashes[name])
        if name not in self._table:
            raise UnknownNameError(
                f"unknown {self.kind} {name!r}{did_you_mean(name, self.names())}"
            )
        return cast(T, pkgutil.resolve_name(self._table[name]))

    @property
    def _table(self) -> dict[str, str]:
        return self._discovered[0]

    @functools.cached_property
    def _discovered(self) -> tuple[dict[str, str], dict[str, str]]:
        """The table with the entry points, and an error for each name that two packages register.

        An entry point cannot replace a name of composer's own.
        """
        table = dict(self.own)
        clashes: dict[str, str] = {}
        for entry in entry_points(group=self.group) if self.group else ():
            first = table.setdefault(entry.name, entry.value)
            if first == entry.value:
                continue
            clash = f"entry point {entry.value!r} registers the {self.kind} {entry.name!r}"
            clash = f"{clash}, which stands for {first!r} already"
            if entry.name in self.own:
                log.warning("%s; it is not used", clash)
            else:
                clashes[entry.name] = clash
        return table, clashes


@dataclass(frozen=True)
class OpenRegistry(Registry[T]):
    """A registry to which the program can add values.

    Attributes:
        added: The values that the program has added, by name.
    """

    added: dict[str, T] = field(default_factory=dict)

    def add(self, name: str, value: T) -> None:
        """Register a value in this process.

        Raises:
            ComposerError: the name stands for another value already.
        """
        path = _path_of(value)
        known = self._table.get(name, path)
        if known != path:
            raise ComposerError(
                f"the {self.kind} {name!r} cannot be {path!r}; it stands for {known!r} already"
            )
        self.added[name] = value

    def get(self, name: str) -> T:
        """Return the value of a name. A value that the program has added takes precedence.

        Raises:
            UnknownNameError: the name is not registered.
            ComposerError: two other packages register it for different values.
        """
        return self.added[name] if name in self.added else super().get(name)

    @property
    def _table(self) -> dict[str, str]:
        return super()._table | {name: _path_of(value) for name, value in self.added.items()}


def _path_of(value: object) -> str:
    return f"{getattr(value, '__module__', '')}:{getattr(value, '__qualname__', '')}"


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the known name that is most similar; ``None`` if none is similar enough.

    Args:
        name: The name. Its case is ignored.
        known: The known names.
        cutoff: The least similarity, from 0 to 1, as ``difflib`` measures it.
    """
    spelled = {each.casefold(): each for each in sorted(known, reverse=True)}
    close = difflib.get_close_matches(name.casefold(), sorted(spelled), n=1, cutoff=cutoff)
    return spelled[close[0]] if close else None


def one_slip_apart(a: str, b: str) -> bool:
    """Return True if two names differ by at most one edit (Damerau-Levenshtein); case is ignored.

    An edit adds, removes or replaces a letter, or swaps two that are next to one another.
    """
    a, b = sorted((a.casefold(), b.casefold()), key=len)
    while a and a[0] == b[0]:
        a, b = a[1:], b[1:]
    is_swapped = a[2:] == b[2:] and a[:2] == b[1::-1]
    return b[1:] in (a, a[1:]) or is_swapped


def names_in(text: str) -> list[str]:
    """Return the names in a text with commas between."""
    return [name.strip() for name in text.split(",") if name.strip()]


def unknown_among(names: Iterable[Any], known: Collection[str], what: str) -> str:
    """Return a text such as ``"unknown option 'x'; did you mean 'y'?"`` for all unknown names.

    Args:
        names: The names that are used.
        known: The known names.
        what: The words before each unknown name.

    Returns:
        An empty text if all names are known.
    """
    unknown = [name for name in names if name not in known]
    return "; ".join(f"{what} {name!r}{did_you_mean(str(name), known)}" for name in unknown)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"``; empty if no known name is similar."""
    close = nearest(name, known)
    return f"; did you mean {close!r}?" if close else ""
