"""Makes a thing once for each captured graph, however many engines of the chain ask for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from composer.build import current_build

T = TypeVar("T")


def once(key: str, make: Callable[[], T]) -> T:
    """What ``make`` returns; made already, where the same key was asked for before.

    Where an engine is called by itself, nothing is kept.
    """
    made = current_build().made
    if made is None:
        return make()
    if key not in made:
        made[key] = make()
    return cast(T, made[key])
