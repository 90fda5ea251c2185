"""The sink ``opentelemetry``: makes spans and metrics with OpenTelemetry's API.

The user's SDK exports them. Without an SDK nothing happens, since the sink uses only the API.
Attributes are named ``composer.*`` after the fields of the record. Everything else follows
OpenTelemetry's semantic conventions: ``error.type``, ``exception`` events, metric names without
``total``, units in UCUM.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from composer.errors import first_line
from composer.records import BEFORE_AUTOGRAD, CompileReport, Reason, Status
from composer.system.distribution import install
from composer.telemetry.base import Sink
from composer.telemetry.totals import COMPILE_SECONDS, News, Total, Totals

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Meter, MeterProvider, Observation
    from opentelemetry.trace import Span, TracerProvider

_OF_GRAPH = (
    *("number", "graph_id", "graph_key", "model", "device", "dtype", "training", "dynamic"),
    *("nodes", "policy", "chosen"),
)
_OF_PASS = ("name", "stage", "changed", "matches", "nodes_before", "nodes_after", "seconds")
_ERRORS = frozenset({Status.FAILED, Status.REJECTED, Status.CRASHED, Status.TIMED_OUT})


class OpenTelemetrySink(Sink):
    """Makes metrics, and a span for each compile, in the trace of the call that caused it.

    A meter provider counts run-time calls for one sink only. The SDK ignores those of a second
    sink.

    Args:
        tracer_provider: The provider for spans; the global one by default.
        meter_provider: The provider for metrics; the global one by default.

    Raises:
        ImportError: opentelemetry-api is not installed.
    """

    def __init__(
        self,
        tracer_provider: TracerProvider | None = None,
        meter_provider: MeterProvider | None = None,
    ) -> None:
        try:
            from opentelemetry import metrics, trace
        except ImportError as error:
            raise ImportError(
                f"the sink 'opentelemetry' needs opentelemetry-api: {install('opentelemetry')}"
            ) from error
        self._totals = Totals()
        self._tracer = trace.get_tracer("composer", tracer_provider=tracer_provider)
        meter = metrics.get_meter("composer", meter_provider=meter_provider)
        self._attempts = meter.create_counter(
            "composer.attempts", "{attempt}", "Candidates tried for a graph."
        )
        # Graph and model are not attributes, since the number of series would grow with every
        # model. An exemplar links a slow compile to its span, which names both.
        self._duration = meter.create_histogram(
            "composer.compile.duration",
            "s",
            "Time that composer took to compile a graph.",
            explicit_bucket_boundaries_advisory=COMPILE_SECONDS,
        )
        self._late = meter.create_counter(
            "composer.compile.late", "{compile}", "Compiles of functions that had settled."
        )
        _observe(meter, self._totals.read)

    def follow(self, report: CompileReport) -> None:
        """Count the calls of this graph."""
        self._totals.follow(report)

    def emit(self, record: dict[str, Any]) -> None:
        """Make the spans of a compile. For a later record of the graph, make only the new ones."""
        from opentelemetry import trace

        news = self._totals.take(record)
        for attempt in news.attempts:
            self._attempts.add(1, _present(attempt, ("backend", "status", "reason")))
        if news.takeover:
            self._recompile(record, news)
        if news.first:
            span = self._compile(record)
            chosen = {"composer.chosen": record["chosen"]}
            self._duration.record(record["seconds"], chosen, trace.set_span_in_context(span))
            if record["late"]:
                self._late.add(1, chosen, trace.set_span_in_context(span))

    def close(self) -> None:
        """Freeze the metrics; the SDK exports them at the end of the process."""
        self._totals.close()

    def _compile(self, record: Mapping[str, Any]) -> Span:
        end = round(datetime.fromisoformat(record["time"]).timestamp() * 1e3) * 1_000_000
        start = end - _nanoseconds(record["seconds"])
        # The span is in the current context: a compile happens within the request that needs it.
        span = self._tracer.start_span(
            "composer.compile", attributes=_present(record, _OF_GRAPH), start_time=start
        )
        if span.is_recording():
            first = self._candidates(span, record["attempts"], end, no_sooner=start)
            _add_passes(span, record["passes"], first, end)
            if not record["chosen"]:
                _set_error(span, "no candidate was accepted")
        span.end(end)
        return span

    def _recompile(self, record: Mapping[str, Any], news: News) -> None:
        """Make the span of candidates that were just tried because an engine failed at run time."""
        attempts, end = record["attempts"][news.known :], time.time_ns()
        start = end - _length(attempts)
        span = self._tracer.start_span(
            "composer.recompile", attributes=_present(record, _OF_GRAPH), start_time=start
        )
        earlier = record["attempts"][: news.known]
        raised = [each for each in earlier if each["reason"] == Reason.RAISED_AT_RUNTIME]
        for each in raised[len(raised) - news.raised :]:
            _add_exception(span, each, start)
        self._candidates(span, attempts, end, no_sooner=start)
        span.end(end)

    def _candidates(
        self, parent: Span, attempts: Sequence[Mapping[str, Any]], end: int, *, no_sooner: int
    ) -> int:
        """Make a span for each candidate. Returns the start of the first one.

        A record has durations but no start times. Candidates run one after the other, and almost no
        time passes after the last one. The start times are therefore computed backwards from the
        end of the compile, but not to before ``no_sooner``. All times are in Unix nanoseconds.
        """
        from opentelemetry import trace

        context = trace.set_span_in_context(parent)
        start = end - _length(attempts)
        first = start = max(start, no_sooner)
        for attempt in attempts:
            finish = min(start + _nanoseconds(attempt["seconds"]), end)
            span = self._tracer.start_span("composer.attempt", context, start_time=start)
            span.set_attributes(_of_attempt(attempt))
            if _is_error(attempt):
                _add_exception(span, attempt, finish)
                _set_error(span, first_line(attempt["message"]) or attempt["reason"])
            span.end(finish)
            start = finish
        return first


def _observe(meter: Meter, read: Callable[[], Mapping[str, Total]]) -> None:
    """Register the run-time totals as metrics that the SDK reads at every export."""
    from opentelemetry.metrics import Observation

    def reader(field: str) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(_: CallbackOptions) -> Iterable[Observation]:
            return [
                Observation(getattr(total, field), {"composer.backend": backend})
                for backend, total in read().items()
            ]

        return observe

    for name, field, unit, description in (
        ("composer.runtime.calls", "calls", "{call}", "Calls of compiled graphs."),
        (
            *("composer.runtime.fallbacks", "fallbacks", "{call}"),
            "Calls that the eager fallback answered for the engine.",
        ),
        ("composer.runtime.time", "seconds", "s", "Host time within the calls, estimated."),
    ):
        meter.create_observable_counter(name, [reader(field)], unit, description)


def _is_error(attempt: Mapping[str, Any]) -> bool:
    return attempt["status"] in _ERRORS


def _of_attempt(attempt: Mapping[str, Any]) -> dict[str, Any]:
    attributes = _present(attempt, ("backend", "status", "reason", "coverage"))
    if attempt["message"]:
        attributes["composer.message"] = attempt["message"]
    if attempt["engine"]:
        attributes["composer.engine"] = json.dumps(attempt["engine"])
    if _is_error(attempt):
        attributes["error.type"] = attempt["error_type"] or attempt["reason"]
    return attributes


def _add_passes(span: Span, passes: Sequence[Mapping[str, Any]], first: int, end: int) -> None:
    """Add an event for each pass, at the time of its end.

    They are events and not spans, since a pass takes only milliseconds. A record does not say when
    the passes within a candidate ran, so their events are at the end of the compile. ``first`` is
    the start of the first candidate; times are in Unix nanoseconds.
    """
    early = [each for each in passes if each["stage"] in BEFORE_AUTOGRAD]
    at = first - _length(early)
    for each in passes:
        at = at + _nanoseconds(each["seconds"]) if each in early else end
        attributes = _present(each, _OF_PASS, prefix="composer.pass.")
        if each["error"]:
            attributes["composer.pass.error"] = each["error"]
        span.add_event("composer.pass", attributes, timestamp=at)


def _add_exception(span: Span, attempt: Mapping[str, Any], at: int) -> None:
    """Add OpenTelemetry's event for exceptions, if the attempt raised an exception."""
    if attempt["error_type"]:
        attributes = {
            "exception.type": attempt["error_type"],
            "exception.message": attempt["message"],
            "exception.stacktrace": attempt["traceback"],
        }
        span.add_event("exception", attributes, timestamp=at)


def _set_error(span: Span, description: str) -> None:
    from opentelemetry.trace import StatusCode

    span.set_status(StatusCode.ERROR, description)


def _present(
    record: Mapping[str, Any], fields: Iterable[str], prefix: str = "composer."
) -> dict[str, Any]:
    """Return attributes for the fields that are not null."""
    return {f"{prefix}{field}": record[field] for field in fields if record[field] is not None}


def _length(entries: Iterable[Mapping[str, Any]]) -> int:
    """Return the nanoseconds that attempts or passes took in all."""
    return sum(_nanoseconds(each["seconds"]) for each in entries)


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
