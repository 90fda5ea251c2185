"""Successors for a served graph: candidates that are built in no time and compute nothing."""

from __future__ import annotations

import contextlib
import random
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from composer.runtime.served import Built, Engine

EAGER = "eager"


class Compiled:
    """What an engine compiled: it answers with its place in the chain."""

    def __init__(self, place: int) -> None:
        self.place = place

    def __call__(self, *args: Any) -> Any:
        return (self.place,)


class FakeSuccessors:
    """A chain of four candidates; one in four builds is refused.

    Attributes:
        record: What was recorded: the failures, and who was chosen, in their order.
        made: Of every engine that was built, a reference that does not keep it.
        faults: What must never happen, and did.
    """

    recovers = True
    collective = False

    def __init__(self, seed: int = 0, retry_after: int | None = 3, refuses: float = 0.25) -> None:
        self.retry_after = retry_after
        self.fallback: Callable[..., Any] = lambda *args: (EAGER,)
        self.record: list[str | int] = []
        self.made: list[weakref.ref[Compiled]] = []
        self.faults: list[str] = []
        self.published = 0
        self._refuses = refuses
        self._random = random.Random(seed)
        self.free_locks()

    def free_locks(self) -> None:
        """Make the locks anew, as composer's own are in a forked child."""
        self._lock, self._changing = threading.RLock(), threading.Lock()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Note a fault if two threads are in here at once."""
        if not self._changing.acquire(blocking=False):
            self.faults.append("two threads change the graph at once")
            yield
            return
        try:
            yield
        finally:
            self._changing.release()

    @property
    def chosen(self) -> str | int:
        """Who serves, by the record."""
        return next(each for each in reversed(self.record) if each == EAGER or type(each) is int)

    def engine(self, place: int) -> Engine:
        compiled = Compiled(place)
        self.made.append(weakref.ref(compiled))
        return Engine(compiled, place, bounds=None)

    def compiling(self) -> Any:
        return self._lock

    def build(self, places: Sequence[int], args: Sequence[Any]) -> Built:
        with self.alone():
            if self.chosen != EAGER:
                self.faults.append(f"another engine is built although {self.chosen} serves")
            place = next((p for p in places if self._random.random() >= self._refuses), None)
            self.record.append(EAGER if place is None else place)
            return Built(None if place is None else self.engine(place))

    def rebuild(self, place: int, args: Sequence[Any]) -> Engine | None:
        with self.alone():
            if self._random.random() < self._refuses:
                return None
            self.record.append(place)
            return self.engine(place)

    def quarantine(self, place: int) -> None:
        pass

    def failed(self, error: BaseException, what: str) -> None:
        with self.alone():
            if error.args != (self.chosen,):
                self.faults.append(f"{error} is given up although {self.chosen} serves")
            self.record += [f"{what} {error}", EAGER]

    def follow(self, decision: Any, args: Sequence[Any], serving: Engine | None) -> Built:
        """Build the candidate at the place that was decided for; none if it is ``None``."""
        with self.alone():
            self.record.append(EAGER if decision.place is None else decision.place)
            order = (decision.place, *(p for p in range(4) if p != decision.place))
            return Built(None if decision.place is None else self.engine(decision.place), order)

    def publish(self) -> None:
        self.published += 1
