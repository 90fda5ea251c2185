"""Names and what they stand for: lazy, extensible by entry points, strict about duplicates."""

from __future__ import annotations

import difflib
import logging
import pkgutil
from collections.abc import Iterable, Mapping
from importlib.metadata import entry_points
from typing import Generic, TypeVar, cast

from composer import forks
from composer.errors import ComposerError, UnknownNameError

T = TypeVar("T")

log = logging.getLogger("composer")


class Registry(Generic[T]):
    """A table from names to values that are imported when first asked for.

    Args:
        kind: What the names name, for messages ("backend").
        table: Name to ``"module:attribute"``.
        group: The entry-point group by which other packages add names.
    """

    def __init__(self, kind: str, table: Mapping[str, str], group: str | None = None) -> None:
        self.kind = kind
        self._group = group
        self._table = dict(table)
        self._loaded: dict[str, T] = {}
        self._refused: dict[str, str] = {}
        self._lock = forks.lock()
        self._discovered = False

    def names(self) -> tuple[str, ...]:
        """Every name, those of other packages included, sorted."""
        self._discover()
        return tuple(sorted(self._table))

    def __contains__(self, name: str) -> bool:
        self._discover()
        return name in self._table

    def add(self, name: str, value: T) -> None:
        """Register a value of this process.

        Raises:
            ComposerError: the name stands for something else already.
        """
        self._discover()
        with self._lock:
            path = f"{getattr(value, '__module__', '')}:{getattr(value, '__qualname__', '')}"
            if self._table.get(name, path) != path:
                raise ComposerError(
                    f"the {self.kind} {name!r} cannot be {path!r}; it stands for "
                    f"{self._table[name]!r} already"
                )
            self._table[name] = path
            self._loaded[name] = value

    def get(self, name: str) -> T:
        """Import and return what ``name`` stands for.

        Raises:
            UnknownNameError: nobody registered the name.
            ComposerError: two other packages did; neither is more right than the other.
        """
        self._discover()
        if name in self._refused:
            raise ComposerError(self._refused[name])
        if name not in self._table:
            raise UnknownNameError(
                f"unknown {self.kind} {name!r}{did_you_mean(name, self.names())}"
            )
        if name not in self._loaded:
            self._loaded[name] = cast(T, pkgutil.resolve_name(self._table[name]))
        return self._loaded[name]

    def _discover(self) -> None:
        """Add the entry points; a name of our own table stays what it is."""
        with self._lock:
            if self._group is None or self._discovered:
                return
            found: dict[str, str] = {}
            for entry in entry_points(group=self._group):
                first = self._table.get(entry.name) or found.setdefault(entry.name, entry.value)
                if first != entry.value:
                    clash = f"entry point {entry.value!r} registers the {self.kind} {entry.name!r}"
                    self._clash(entry.name, f"{clash}, which stands for {first!r} already")
            self._table |= found
            self._discovered = True

    def _clash(self, name: str, message: str) -> None:
        if name in self._table:
            log.warning("%s; it is not used", message)
        else:
            self._refused[name] = message


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
