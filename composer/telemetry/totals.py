"""Totals over all graphs of a process, for sinks that feed metrics. Totals never decrease."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from composer.records import CompileReport, Reason, Runtime, Status
from composer.system import forks

KEPT_GRAPHS = 1000
COMPILE_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
"""Histogram buckets in seconds for the time of a compile, from small graphs to large models with
autotuning."""


@dataclass(frozen=True, slots=True)
class Total:
    """The number of calls, the number that the eager fallback answered, and the time within calls.

    The time is an integer. A sum of floats in another order can be slightly lower, and Prometheus
    would take the decrease for a restart of the process.
    """

    calls: int = 0
    fallbacks: int = 0
    nanoseconds: int = 0

    @classmethod
    def of(cls, runtime: Runtime) -> Total:
        """Return the current counters of a graph."""
        now = runtime.read()
        return cls(now.calls, now.fallbacks, round(now.seconds * 1e9))

    @property
    def seconds(self) -> float:
        """The time within the calls, in seconds."""
        return self.nanoseconds / 1e9

    def __add__(self, other: Total) -> Total:
        return Total(
            self.calls + other.calls,
            self.fallbacks + other.fallbacks,
            self.nanoseconds + other.nanoseconds,
        )

    def __sub__(self, other: Total) -> Total:
        return self + Total(-other.calls, -other.fallbacks, -other.nanoseconds)


@dataclass(frozen=True, slots=True)
class News:
    """The new facts in a record, compared with earlier records of its graph.

    Attributes:
        first: True if it is the first record of the graph.
        known: The number of its attempts that an earlier record had.
        attempts: The attempts that are new: the later ones, and those in the place of an earlier
            one. An engine that served, and failed at a call, is not new.
        raised: The number of engines that raised at run time since the last reported takeover.
        takeover: True if composer tried further candidates after an engine raised at run time, or
            if the eager fallback serves because none is left.
    """

    first: bool
    known: int = 0
    attempts: tuple[Mapping[str, Any], ...] = ()
    raised: int = 0
    takeover: bool = False


@dataclass(slots=True)
class _Graph:
    """A graph that is followed. ``since`` holds the counters when ``backend`` began to serve it."""

    runtime: Runtime
    backend: str
    since: Total = Total()

    def done(self) -> Total:
        return Total.of(self.runtime) - self.since


@dataclass(slots=True)
class _Known:
    """Facts from the records of a graph so far.

    ``results`` are the status and reason of each attempt. ``raised`` is the number of engines that
    raised at run time; ``chosen`` is the engine that serves it.
    """

    results: tuple[tuple[str, str | None], ...]
    raised: int
    chosen: str


class Totals:
    """Run-time counters by backend, and the new facts in each record.

    The newest 1,000 graphs are followed. The counters of an older graph stay in the totals, but its
    later calls are not counted. The known attempts are kept for 100,000 graphs.
    """

    def __init__(self) -> None:
        self._lock = forks.lock()
        self._past: dict[str, Total] = {}
        self._graphs: OrderedDict[int, _Graph] = OrderedDict()
        self._known: OrderedDict[int, _Known] = OrderedDict()

    def follow(self, report: CompileReport) -> None:
        """Count the calls of this graph."""
        number = report.number
        with self._lock:
            self._drop(number)
            self._known.pop(number, None)
            self._graphs[number] = _Graph(report.runtime, report.chosen)
            if len(self._graphs) > KEPT_GRAPHS:
                self._drop(next(iter(self._graphs)))

    def take(self, record: Mapping[str, Any]) -> News:
        """Note the engine that serves a graph from now on, and return the news in the record."""
        number = record["number"]
        attempts, chosen = record["attempts"], record["chosen"]
        results = tuple((each["status"], each["reason"]) for each in attempts)
        with self._lock:
            self._serves(number, chosen)
            earlier = self._known.get(number)
            if earlier is None:
                self._known[number] = _Known(results, _raised(attempts), chosen)
                if len(self._known) > 100 * KEPT_GRAPHS:
                    self._known.popitem(last=False)
                return News(first=True, attempts=tuple(attempts))
            known = len(earlier.results)
            raised = _raised(attempts[:known]) - earlier.raised
            new = (*_replaced(attempts, earlier.results), *attempts[known:])
            takeover = known < len(attempts) or (raised > 0 and chosen == earlier.chosen)
            earlier.results, earlier.chosen = results, chosen
            if takeover:
                earlier.raised = _raised(attempts)
        return News(False, known, new, raised, takeover)

    def _serves(self, number: int, backend: str) -> None:
        """Count the calls of a graph for this backend from now on."""
        graph = self._graphs.get(number)
        if graph is not None and graph.backend != backend:
            done = graph.done()
            self._keep(graph.backend, done)
            graph.backend, graph.since = backend, graph.since + done

    def read(self) -> dict[str, Total]:
        """Return the totals of each backend."""
        with self._lock:
            totals = dict(self._past)
            for graph in self._graphs.values():
                totals[graph.backend] = totals.get(graph.backend, Total()) + graph.done()
        totals.pop("", None)  # graphs whose compile ended in an error
        return totals

    def close(self) -> None:
        """Read the graphs for the last time; after that the totals do not change."""
        with self._lock:
            for number in tuple(self._graphs):
                self._drop(number)

    def _drop(self, number: int) -> None:
        if number in self._graphs:
            graph = self._graphs.pop(number)
            self._keep(graph.backend, graph.done())

    def _keep(self, backend: str, done: Total) -> None:
        self._past[backend] = self._past.get(backend, Total()) + done


def _replaced(
    attempts: Sequence[Mapping[str, Any]], results: Sequence[tuple[str, str | None]]
) -> Iterator[Mapping[str, Any]]:
    """Yield the attempts in the place of earlier ones, such as after a choice in the background."""
    for attempt, earlier in zip(attempts, results, strict=False):
        has_served = earlier[0] == Status.SUCCEEDED
        if not has_served and (attempt["status"], attempt["reason"]) != earlier:
            yield attempt


def _raised(attempts: Sequence[Mapping[str, Any]]) -> int:
    return sum(each["reason"] == Reason.RAISED_AT_RUNTIME for each in attempts)
