"""What is being compiled right now, for whoever wants to show it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from composer.records import GraphRequest


@dataclass(frozen=True, slots=True)
class Step:
    """One step under way.

    ``what`` is the candidate's name, or ``"shared passes"``. ``started`` is a reading of
    ``time.perf_counter``.
    """

    number: int
    model: str
    nodes: int
    what: str
    started: float

    @property
    def seconds(self) -> float:
        """How long it has been going on."""
        return time.perf_counter() - self.started


class Progress:
    """The steps under way in all threads: nobody is called, whoever wants to know looks."""

    def __init__(self) -> None:
        self._steps: dict[int, Step] = {}
        self._serial = itertools.count()

    def now(self) -> tuple[Step, ...]:
        """The steps under way, the longest first."""
        return tuple(self._steps.copy().values())

    @contextmanager
    def step(self, request: GraphRequest, what: str) -> Iterator[None]:
        """Be seen doing ``what`` for a graph."""
        serial = next(self._serial)
        self._steps[serial] = Step(
            request.number, request.model, request.nodes, what, time.perf_counter()
        )
        try:
            yield
        finally:
            del self._steps[serial]
