"""Makes a thing once for each captured graph, however many engines of the chain ask for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar, cast

T = TypeVar("T")

_made: ContextVar[dict[str, object] | None] = ContextVar("composer_made", default=None)


@contextmanager
def sharing() -> Iterator[None]:
    """Keep what :func:`once` makes for as long as one graph is being compiled."""
    token = _made.set({})
    try:
        yield
    finally:
        _made.reset(token)


def once(key: str, make: Callable[[], T]) -> T:
    """What ``make`` returns; made already, where the same key was asked for before.

    Outside of :func:`sharing`, where an engine is called by itself, nothing is kept.
    """
    made = _made.get()
    if made is None:
        return make()
    if key not in made:
        made[key] = make()
    return cast(T, made[key])
