"""The sink ``prometheus``: series in the user's own registry, which the user's own server shows."""

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
    """Attempts and compile times as they come; calls, read from the live graphs at each scrape.

    Nothing is served or sent: that is for ``prometheus_client.start_http_server`` and its like.

    Args:
        registry: Where the series go; ``prometheus_client.REGISTRY`` if none is given.

    Raises:
        ImportError: prometheus-client is not installed.
        ValueError: the registry has these series already.
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
        """Count the attempts that no earlier record of the graph had, and time its compile."""
        news = self._series.totals.take(record)
        for attempt in record["attempts"][news.known :]:
            labels = attempt["backend"], attempt["status"], attempt["reason"] or ""
            self._series.attempts.labels(*labels).inc()
        if news.first:
            self._series.compiles.labels(record["chosen"]).observe(record["seconds"])

    def close(self) -> None:
        """Take the series out of the registry; a second time does nothing."""
        if self._open:
            self._open = False
            self._registry.unregister(self._series)


class _Series:
    """All series as one collector, so that a registry takes them all or none.

    Those that are filled as records come are prometheus-client's own kinds, which its multiprocess
    mode sums over the processes; of those made at a scrape it sees nothing.
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

    def describe(self) -> Iterator[Metric]:
        """The names that must be free in the registry."""
        yield from self.attempts.describe()
        yield from self.compiles.describe()
        yield from _runtime({})

    def collect(self) -> Iterator[Metric]:
        """Everything as it stands at a scrape."""
        yield from self.attempts.collect()
        yield from self.compiles.collect()
        yield from _runtime(self.totals.read())


def _runtime(totals: Mapping[str, Total]) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily

    calls = CounterMetricFamily(
        "composer_runtime_calls", "Calls of compiled graphs.", labels=["backend"]
    )
    fallbacks = CounterMetricFamily(
        "composer_runtime_fallbacks",
        "Calls that the eager fallback answered for the engine.",
        labels=["backend"],
    )
    seconds = CounterMetricFamily(
        "composer_runtime_seconds",
        "Host time within the calls of compiled graphs, estimated from a sample of them.",
        labels=["backend"],
    )
    for backend, total in totals.items():
        calls.add_metric([backend], total.calls)
        fallbacks.add_metric([backend], total.fallbacks)
        seconds.add_metric([backend], total.seconds)
    yield from (calls, fallbacks, seconds)
