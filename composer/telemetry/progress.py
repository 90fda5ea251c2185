"""Says what is being compiled now, for code that shows progress."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from composer.records import GraphRequest
from composer.system import forks


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a compile that is running now.

    ``what`` is the candidate's name, or ``"shared passes"``. ``started`` is a value of
    ``time.perf_counter``.
    """

    number: int
    model: str
    nodes: int
    what: str
    started: float

    @property
    def seconds(self) -> float:
        """The time since the step started."""
        return time.perf_counter() - self.started

    def __str__(self) -> str:
        """Return a text such as ``"graph 3 (Net): onnxrt, 2 of 3, for 4 s"``."""
        return f"graph {self.number} ({self.model}): {self.what}, for {self.seconds:.0f} s"


class Progress:
    """The steps that are running now, in all threads. There are no callbacks; readers poll it."""

    def __init__(self) -> None:
        self._steps: dict[int, Step] = {}
        forks.with_each_child(self, lambda each: each._steps.clear())
        self._serial = itertools.count()

    def now(self) -> tuple[Step, ...]:
        """Return the steps that are running now; the one that started first comes first."""
        return tuple(self._steps.copy().values())

    @contextmanager
    def step(self, request: GraphRequest, what: str) -> Iterator[None]:
        """Show the step ``what`` of a graph while the context is open."""
        serial = next(self._serial)
        self._steps[serial] = Step(
            request.number, request.model, request.nodes, what, time.perf_counter()
        )
        try:
            yield
        finally:
            self._steps.pop(serial, None)  # a fork has cleared it
