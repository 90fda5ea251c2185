"""Decides which calls of a graph are special, such as those that are compared with eager."""

from __future__ import annotations

import sys
from enum import Enum, auto

NEVER = sys.maxsize


class CallKind(Enum):
    """The additional work at a call.

    ``BEGIN``: background work begins. ``RETRY``: an engine in quarantine is tried again.
    ``COMPARE``: the answer is compared with eager's.
    """

    PLAIN = auto()
    BEGIN = auto()
    RETRY = auto()
    COMPARE = auto()


class Schedule:
    """The number of the next call of each kind, the first call being 0.

    Attributes:
        retry_at: The next try of an engine in quarantine.
        let_go_at: The call from which on the engine that was replaced is kept no longer.
    """

    __slots__ = ("_begin_at", "_compare_at", "_every", "let_go_at", "retry_at")

    def __init__(self, every: int | None, *, begins: bool) -> None:
        self._every = every or NEVER
        self._compare_at = self._every - 1
        self._begin_at = 1 if begins else NEVER
        self.retry_at = self.let_go_at = NEVER

    @property
    def next(self) -> int:
        """The next call that may be special."""
        return min(self._compare_at, self.retry_at, self._begin_at, self.let_go_at)

    def kind_of(self, call: int) -> CallKind:
        """Return the kind of this call, and mark it as done: ask only once for each call."""
        if call >= self._begin_at:
            self._begin_at = NEVER
            return CallKind.BEGIN
        if call >= self.retry_at:
            self.retry_at = NEVER
            return CallKind.RETRY
        if self._every == 1:  # every call is compared, in whatever order threads come here
            return CallKind.COMPARE
        if call >= self._compare_at:
            self._compare_at = call + self._every - (call + 1) % self._every
            return CallKind.COMPARE
        return CallKind.PLAIN
