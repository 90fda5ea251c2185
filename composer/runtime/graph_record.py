"""The record of one graph as it changes after the compile, for the program and the sinks."""

from __future__ import annotations

import dataclasses
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from composer import session
from composer.graphs import sizes
from composer.records import Attempt, CompileReport, PassRecord, SizeRange
from composer.system import forks
from composer.telemetry import notices

Attempts = tuple[Attempt, ...]


@dataclass(eq=False)
class Serving:
    """One of those that serve a graph; there are several where ranges of sizes have their own.

    Attributes:
        chosen: The engine.
        sizes: The sizes at which it was measured to be the fastest.
    """

    chosen: str
    sizes: tuple[int, ...] = ()


class GraphRecord:
    """The record, and who is still to hear of its changes.

    Args:
        report: The record after the compile.
        early: Records of the passes that ran before every candidate.
        noted: Returns attempts that say where others can see what went wrong.
        asked_by_name: True if the policy names the engines, so that every fallback is a warning.

    Attributes:
        report: The current record.
        servings: Those that serve the graph. The first is that of the compile.
    """

    def __init__(
        self,
        report: CompileReport,
        early: tuple[PassRecord, ...],
        noted: Callable[[Attempts], Attempts],
        *,
        asked_by_name: bool,
    ) -> None:
        self.report = report
        self.servings = [Serving(report.chosen)]
        self._early = early
        self._noted = noted
        self._asked_by_name = asked_by_name
        self._unpublished: deque[CompileReport] = deque()
        self._unheard: list[tuple[int, CompileReport]] = []
        self._publishing = forks.lock()
        self._changing = forks.lock()

    @property
    def late_passes(self) -> tuple[PassRecord, ...]:
        """Records of the passes of the candidate that serves."""
        return self.report.passes[len(self._early) :]

    def add(
        self,
        serving: Serving,
        attempts: Attempts,
        chosen: str,
        passes: tuple[PassRecord, ...] | None = None,
    ) -> None:
        """Add attempts, and say who serves from now on.

        Args:
            serving: Which of those that serve has changed.
            attempts: The attempts; none if only the sizes have changed.
            chosen: The engine that serves.
            passes: Records of its own passes; ``None`` if it served before.
        """
        self.change(serving, lambda known: (*known, *attempts), chosen, passes)

    def change(
        self,
        serving: Serving,
        new: Callable[[Attempts], Iterable[Attempt]],
        chosen: str,
        passes: tuple[PassRecord, ...] | None = None,
    ) -> None:
        """Put attempts in the place of the known ones, and say who serves from now on.

        Args:
            serving: As for :meth:`add`.
            new: Returns the attempts, given the known ones.
            chosen: As for :meth:`add`.
            passes: As for :meth:`add`.
        """
        with self._changing:
            serving.chosen = chosen
            first = self.servings[0]
            is_new = passes is not None and serving is first
            changed = dataclasses.replace(
                self.report,
                attempts=self._noted(tuple(new(self.report.attempts))),
                chosen=first.chosen,
                ranges=self._ranges(),
                passes=(*self._early, *(passes or ())) if is_new else self.report.passes,
            )
            session.current().replace(self.report, changed)
            self.report = changed
            self._unpublished.append(changed)
            self._unheard.append((threading.get_ident(), changed))

    def serves_at(self, serving: Serving, size: int) -> None:
        """Note a size at which an engine is the fastest; record it if that changes a range."""
        serving.sizes = (*serving.sizes, size)
        if self._ranges() != self.report.ranges:
            self.add(serving, (), serving.chosen)

    def _ranges(self) -> tuple[SizeRange, ...]:
        """Return who serves which sizes; nothing if one engine serves all."""
        by_size = {size: each for each in self.servings for size in each.sizes}
        found = sizes.ranges(by_size) if by_size else []
        ranges = (SizeRange(least, each.chosen) for least, each in found)
        return tuple(ranges) if len(found) > 1 else ()

    def publish(self) -> None:
        """Give the records of the changes to the sinks, and warn of those that this thread made.

        The served graph's lock is not held here, because a sink may be slow or may call the graph.

        Raises:
            FallbackWarning: the user has turned that warning into an error.
        """
        here = session.current()
        with self._publishing:
            while self._unpublished:
                here.sinks.emit(self._unpublished.popleft(), first=False)
        for mine in [each for each in self._unheard if each[0] == threading.get_ident()]:
            self._unheard.remove(mine)
            notices.warn_of_fallbacks(mine[1], asked_by_name=self._asked_by_name)
