"""What a process counts over all its graphs, for sinks that feed metrics: totals never go down."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from composer.records import CompileReport, Runtime

KEPT_GRAPHS = 1000
COMPILE_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
"""Buckets for the time of a compile: from a small graph to a large model with autotuning."""

Key = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class Total:
    """Calls, calls that the floor answered, and the time within them.

    Time is kept in whole nanoseconds: sums of floats in another order may come out a trifle lower,
    which Prometheus would take for a restart of the process.
    """

    calls: int = 0
    fallbacks: int = 0
    nanoseconds: int = 0

    @classmethod
    def of(cls, runtime: Runtime) -> Total:
        """A graph's counters as they stand now."""
        now = runtime.read()
        return cls(now.calls, now.fallbacks, round(now.seconds * 1e9))

    @property
    def seconds(self) -> float:
        """The time within the calls."""
        return self.nanoseconds / 1e9

    def __add__(self, other: Total) -> Total:
        return Total(
            self.calls + other.calls,
            self.fallbacks + other.fallbacks,
            self.nanoseconds + other.nanoseconds,
        )

    def __sub__(self, other: Total) -> Total:
        return self + Total(-other.calls, -other.fallbacks, -other.nanoseconds)


@dataclass(slots=True)
class _Graph:
    """A graph that is followed: what its ``runtime`` has beyond ``since`` is the backend's."""

    runtime: Runtime
    backend: str
    since: Total = Total()
    attempts: int = 0

    def done(self) -> Total:
        return Total.of(self.runtime) - self.since


class Totals:
    """Run-time counters by backend, and which attempts of a graph are new.

    The newest 1,000 graphs are followed. What an older one had counted stays in the totals; its
    calls from then on are not seen.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._past: dict[str, Total] = {}
        self._graphs: OrderedDict[Key, _Graph] = OrderedDict()

    def follow(self, report: CompileReport) -> None:
        """Count the calls of this graph."""
        key = report.graph_id, report.time, report.graph_key
        with self._lock:
            self._drop(key)
            self._graphs[key] = _Graph(report.runtime, report.chosen)
            if len(self._graphs) > KEPT_GRAPHS:
                self._drop(next(iter(self._graphs)))

    def take(self, record: Mapping[str, Any]) -> int:
        """Note who serves a graph from now on.

        Returns:
            How many of its attempts an earlier record of the graph had already.
        """
        with self._lock:
            graph = self._graphs.get((record["graph_id"], record["time"], record["graph_key"]))
            if graph is None:
                return 0
            if graph.backend != record["chosen"]:
                done = graph.done()
                self._keep(graph.backend, done)
                graph.backend, graph.since = record["chosen"], graph.since + done
            known, graph.attempts = graph.attempts, len(record["attempts"])
            return known

    def read(self) -> dict[str, Total]:
        """What each backend has done up to now."""
        with self._lock:
            totals = dict(self._past)
            for graph in self._graphs.values():
                totals[graph.backend] = totals.get(graph.backend, Total()) + graph.done()
        totals.pop("", None)  # graphs whose compile ended in an error
        return totals

    def close(self) -> None:
        """Look at the graphs for the last time: the totals stay as they are."""
        with self._lock:
            for key in tuple(self._graphs):
                self._drop(key)

    def _drop(self, key: Key) -> None:
        if key in self._graphs:
            graph = self._graphs.pop(key)
            self._keep(graph.backend, graph.done())

    def _keep(self, backend: str, done: Total) -> None:
        self._past[backend] = self._past.get(backend, Total()) + done
