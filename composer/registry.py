"""Names and what they stand for: lazy, extensible by entry points, strict about duplicates."""

from __future__ import annotations

import difflib
import functools
import logging
import pkgutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Generic, TypeVar, cast

from composer.errors import ComposerError, UnknownNameError

T = TypeVar("T")

log = logging.getLogger("composer")


@dataclass(frozen=True)
class Registry(Generic[T]):
    """A table from names to values that are imported when they are asked for.

    Attributes:
        kind: What the names name, for messages ("backend").
        own: Name to ``"module:attribute"``.
        group: The entry-point group by which other packages add names.
    """

    kind: str
    own: Mapping[str, str]
    group: str | None = None

    def names(self) -> tuple[str, ...]:
        """Every name, those of other packages included, sorted."""
        return tuple(sorted(self._table))

    def __contains__(self, name: str) -> bool:
        return name in self._table

    def get(self, name: str) -> T:
        """Import and return what ``name`` stands for.

        Raises:
            UnknownNameError: nobody registered the name.
            ComposerError: two other packages did; neither is more right than the other.
        """
        if name in self._refused:
            raise ComposerError(self._refused[name])
        if name not in self._table:
            raise UnknownNameError(
                f"unknown {self.kind} {name!r}{did_you_mean(name, self.names())}"
            )
        return cast(T, pkgutil.resolve_name(self._table[name]))

    @property
    def _table(self) -> dict[str, str]:
        return self._discovered[0]

    @property
    def _refused(self) -> dict[str, str]:
        return self._discovered[1]

    @functools.cached_property
    def _discovered(self) -> tuple[dict[str, str], dict[str, str]]:
        """The table with the entry points, and why the names are refused that two packages claim.

        A name of our own table stays what it is.
        """
        found: dict[str, str] = {}
        refused: dict[str, str] = {}
        for entry in entry_points(group=self.group) if self.group else ():
            first = self.own.get(entry.name) or found.setdefault(entry.name, entry.value)
            if first == entry.value:
                continue
            clash = f"entry point {entry.value!r} registers the {self.kind} {entry.name!r}"
            clash = f"{clash}, which stands for {first!r} already"
            if entry.name in self.own:
                log.warning("%s; it is not used", clash)
            else:
                refused[entry.name] = clash
        return {**self.own, **found}, refused


@dataclass(frozen=True)
class OpenRegistry(Registry[T]):
    """A registry to which the program adds values of its own.

    Attributes:
        added: Name to value.
    """

    added: dict[str, T] = field(default_factory=dict)

    def add(self, name: str, value: T) -> None:
        """Register a value of this process.

        Raises:
            ComposerError: the name stands for something else already.
        """
        path, known = _path_of(value), self._table.get(name)
        if known not in (path, None):
            raise ComposerError(
                f"the {self.kind} {name!r} cannot be {path!r}; it stands for {known!r} already"
            )
        self.added[name] = value

    def get(self, name: str) -> T:
        """Return what was added under ``name``, or import what it stands for.

        Raises:
            UnknownNameError: nobody registered the name.
            ComposerError: two other packages did; neither is more right than the other.
        """
        return self.added[name] if name in self.added else super().get(name)

    @property
    def _table(self) -> dict[str, str]:
        return super()._table | {name: _path_of(value) for name, value in self.added.items()}


def _path_of(value: object) -> str:
    return f"{getattr(value, '__module__', '')}:{getattr(value, '__qualname__', '')}"


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known name most like ``name``, in capitals or not; ``None`` below ``cutoff``."""
    spelled = {each.casefold(): each for each in sorted(known, reverse=True)}
    close = difflib.get_close_matches(name.casefold(), sorted(spelled), n=1, cutoff=cutoff)
    return spelled[close[0]] if close else None


def one_slip_apart(a: str, b: str) -> bool:
    """Whether two names differ by no more than a letter added, or another, or two that swapped.

    That is a distance of at most one by Damerau, in capitals or not.
    """
    a, b = sorted((a.casefold(), b.casefold()), key=len)
    while a and a[0] == b[0]:
        a, b = a[1:], b[1:]
    swapped = a[2:] == b[2:] and a[:2] == b[1::-1]
    return a == b[1:] or a[1:] == b[1:] or swapped


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``"; did you mean 'x'?"``, or nothing where nothing is close."""
    close = nearest(name, known)
    return f"; did you mean {close!r}?" if close else ""
