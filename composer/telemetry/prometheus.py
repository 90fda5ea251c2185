"""The sink ``prometheus``: adds series to the user's registry; the user's server exposes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from composer.records import CompileReport
from composer.system.distribution import install
from composer.telemetry.base import Sink
from composer.telemetry.totals import COMPILE_SECONDS, Total, Totals

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Counter, Histogram, Metric


class PrometheusSink(Sink):
    """Counts attempts, compile times and calls in a registry of prometheus-client.

    Attempts and compile times are counted when a record arrives. Calls are read from the live
    graphs at each scrape. The sink serves and sends nothing; use
    ``prometheus_client.start_http_server`` or the like.

    Args:
        registry: The registry for the series; ``prometheus_client.REGISTRY`` by default.

    Raises:
        ImportError: prometheus-client is not installed.
        ValueError: The registry has these series already.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        try:
            import prometheus_client
        except ImportError as error:
            raise ImportError(
                f"the sink 'prometheus' needs prometheus-client: {install('prometheus')}"
            ) from error
        self._registry = prometheus_client.REGISTRY if registry is None else registry
        self._series = _Series()
        try:
            self._registry.register(self._series)
        except ValueError as error:
            raise ValueError(
                "this registry has composer's series already: close() the sink that fills them, "
                "or give PrometheusSink another registry"
            ) from error
        self._open = True

    def follow(self, report: CompileReport) -> None:
        """Show the calls of this graph at the next scrape."""
        self._series.totals.follow(report)

    def emit(self, record: dict[str, Any]) -> None:
        """Count the new attempts of the graph, and at its first record the time of the compile."""
        news = self._series.totals.take(record)
        for attempt in news.attempts:
            labels = attempt["backend"], attempt["status"], attempt["reason"] or ""
            self._series.attempts.labels(*labels).inc()
        if news.first:
            self._series.compiles.labels(record["chosen"]).observe(record["seconds"])
            if record["late"]:
                self._series.late.labels(record["chosen"]).inc()

    def close(self) -> None:
        """Remove the series from the registry. A second call does nothing."""
        if self._open:
            self._open = False
            self._registry.unregister(self._series)


class _Series:
    """All series as one collector, so that a registry accepts all of them or none.

    Attempts and compile times use prometheus-client's own classes, which its multiprocess mode sums
    over the processes. That mode does not see the series that are made at a scrape.
    """

    def __init__(self) -> None:
        from prometheus_client import Counter, Histogram

        self.totals = Totals()
        self.attempts: Counter = Counter(
            "composer_attempts",
            "Candidates tried for a graph; reason is empty for one that was accepted.",
            ("backend", "status", "reason"),
            registry=None,
        )
        self.compiles: Histogram = Histogram(
            "composer_compile_seconds",
            "Time that composer took to compile a graph, by who serves it.",
            ("chosen",),
            buckets=COMPILE_SECONDS,
            registry=None,
        )

        self.late: Counter = Counter(
            "composer_late_compiles",
            "Compiles of functions that had settled, by who serves the graph.",
            ("chosen",),
            registry=None,
        )

    def describe(self) -> Iterator[Metric]:
        """Yield the series without values; their names must be free in the registry."""
        yield from self.attempts.describe()
        yield from self.compiles.describe()
        yield from self.late.describe()
        yield from _runtime({})

    def collect(self) -> Iterator[Metric]:
        """Yield all series with their values at a scrape."""
        yield from self.attempts.collect()
        yield from self.compiles.collect()
        yield from self.late.collect()
        yield from _runtime(self.totals.read())


_RUNTIME = {
    "calls": "Calls of compiled graphs.",
    "fallbacks": "Calls that the eager fallback answered for the engine.",
    "seconds": "Host time within the calls of compiled graphs, estimated from a sample of them.",
}
"""The description of each series that is made at a scrape, by the field of :class:`Total`."""


def _runtime(totals: Mapping[str, Total]) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily

    for field, description in _RUNTIME.items():
        family = CounterMetricFamily(f"composer_runtime_{field}", description, labels=["backend"])
        for backend, total in totals.items():
            family.add_metric([backend], getattr(total, field))
        yield family
