"""The policy's ``freeze`` for the build under way: whether engines take weights in as constants."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

Freeze = Literal["auto", True, False]
"""``"auto"`` leaves it to each engine; ``True`` has all take them in that can, ``False`` none."""

_freeze: ContextVar[Freeze] = ContextVar("composer_freeze", default="auto")


@contextmanager
def freezing(wish: Freeze) -> Iterator[None]:
    """Let builds take weights in, or not."""
    token = _freeze.set(wish)
    try:
        yield
    finally:
        _freeze.reset(token)


def freeze() -> Freeze:
    """What the policy says for the build under way."""
    return _freeze.get()
