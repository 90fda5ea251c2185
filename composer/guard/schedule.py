"""Which of a graph's calls are special: compared, made by another engine, or where work begins."""

from __future__ import annotations

import sys
from enum import Enum, auto

_NEVER = sys.maxsize


class Kind(Enum):
    """What there is to a call but that it is answered."""

    PLAIN = auto()
    BEGIN = auto()
    RETRY = auto()
    COMPARE = auto()


class Schedule:
    """When the next call of each kind is, by the numbers of calls, the first being 0.

    ``_begin_at`` is when what goes on beside the calls begins, ``_retry_at`` when an engine out of
    quarantine is tried again, ``_compare_at`` when the answer is compared with the floor's. From
    ``_let_go_at`` on, the engine that was taken over from is kept no longer.
    """

    __slots__ = ("_begin_at", "_compare_at", "_every", "_let_go_at", "_retry_at")

    def __init__(self, every: int | None, *, begins: bool) -> None:
        self._every = every or _NEVER
        self._compare_at = self._every - 1
        self._begin_at = 1 if begins else _NEVER
        self._retry_at = self._let_go_at = _NEVER

    @property
    def next(self) -> int:
        """The first call that there may be something to."""
        return min(self._compare_at, self._retry_at, self._begin_at, self._let_go_at)

    def retry(self, call: int | None) -> None:
        """Have an engine tried again at this call; ``None`` for at none."""
        self._retry_at = _NEVER if call is None else call

    def let_go(self, call: int | None) -> None:
        """Have an engine let go at this call; ``None`` where there is none, or none any more."""
        self._let_go_at = _NEVER if call is None else call

    def lets_go(self, call: int) -> bool:
        """Whether the engine that was taken over from has been kept long enough."""
        return call >= self._let_go_at

    def kind_of(self, call: int) -> Kind:
        """What there is to this call, and to no other after it."""
        if call >= self._begin_at:
            self._begin_at = _NEVER
            return Kind.BEGIN
        if call >= self._retry_at:
            self._retry_at = _NEVER
            return Kind.RETRY
        if call >= self._compare_at:
            self._compare_at = call + self._every - (call + 1) % self._every
            return Kind.COMPARE
        return Kind.PLAIN
