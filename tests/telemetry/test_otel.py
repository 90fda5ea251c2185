"""The sink ``opentelemetry``, against OpenTelemetry's own SDK."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
import torch
from common import compiled, last
from engines import honest, lacks_a_package, raises, returns_none
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import StatusCode
from recordings import taken_over
from rewrites import Raises, Scale, at
from torch._dynamo.exc import BackendCompilerFailed

from composer import session
from composer.telemetry.otel import OpenTelemetrySink
from composer.testing import FakeBackend


class Collected:
    """What an SDK was given: spans and metrics."""

    def __init__(self, **settings: Any) -> None:
        self.exporter = InMemorySpanExporter()
        self.tracer_provider = TracerProvider(**settings)
        self.tracer_provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.reader = InMemoryMetricReader()
        self.meter_provider = MeterProvider([self.reader])

    def spans(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if span.name == name]

    def metrics(self) -> dict[str, Any]:
        found = self.reader.get_metrics_data()
        assert found is not None
        ((scope,),) = [each.scope_metrics for each in found.resource_metrics]
        assert scope.scope.name == "composer"
        return {metric.name: metric for metric in scope.metrics}

    def values(self, name: str) -> dict[tuple[Any, ...], Any]:
        """Attribute values, in the order of their names, to the number."""
        points = self.metrics()[name].data.data_points
        return {tuple(v for _, v in sorted(p.attributes.items())): p.value for p in points}


@pytest.fixture
def collected() -> Iterator[Collected]:
    sdk = Collected()
    sink = OpenTelemetrySink(sdk.tracer_provider, sdk.meter_provider)
    session.add_sink(sink)
    yield sdk
    session.remove_sink(sink)
    sdk.tracer_provider.shutdown()
    sdk.meter_provider.shutdown()


def test_compile_is_a_span_with_a_child_for_each_candidate(collected: Collected) -> None:
    """The compile ends when the record says; candidates follow each other up to that end."""
    compiled(torch.nn.Linear(2, 2), raises, lacks_a_package, honest)(torch.ones(3, 2))
    (root,) = collected.spans("composer.compile")
    tried = collected.spans("composer.attempt")
    ended = datetime.fromtimestamp(root.end_time / 1e9, UTC).isoformat(timespec="milliseconds")
    assert ended == last().time
    assert root.end_time - root.start_time == pytest.approx(last().seconds * 1e9, abs=2)
    assert [span.parent.span_id for span in tried] == [root.context.span_id] * 3
    names = [span.attributes["composer.backend"] for span in tried]
    assert names == ["raises", "lacks_a_package", "honest"]
    assert root.start_time <= tried[0].start_time
    assert [span.end_time for span in tried] == [*(s.start_time for s in tried[1:]), root.end_time]
    for span, attempt in zip(tried, last().attempts, strict=True):
        assert span.end_time - span.start_time == pytest.approx(attempt.seconds * 1e9, abs=2)


def test_compile_span_says_what_was_compiled(collected: Collected) -> None:
    """Under the names of the record's fields."""
    compiled(torch.nn.Linear(2, 2), honest)(torch.ones(3, 2))
    (root,) = collected.spans("composer.compile")
    assert dict(root.attributes) == {
        "composer.number": 1,
        "composer.graph_id": "0/0",
        "composer.graph_key": last().graph_key,
        "composer.model": "torch.nn.modules.linear.Linear",
        "composer.device": "cpu",
        "composer.dtype": "float32",
        "composer.training": True,
        "composer.dynamic": False,
        "composer.nodes": 1,
        "composer.policy": ("options",),
        "composer.chosen": "honest",
    }
    assert root.status.status_code is StatusCode.UNSET


def test_span_of_a_failed_candidate_is_an_error_with_the_exception(collected: Collected) -> None:
    """As OpenTelemetry's conventions have it; a candidate that said no is no error."""
    compiled(torch.sin, raises, lacks_a_package, returns_none, honest)(torch.ones(2))
    failed, absent, rejected, accepted = collected.spans("composer.attempt")
    assert failed.status.status_code is StatusCode.ERROR
    assert failed.status.description == "no such kernel"
    assert failed.attributes["error.type"] == "RuntimeError"
    assert failed.attributes["composer.status"] == "failed"
    assert failed.attributes["composer.reason"] == "build_failed"
    (event,) = failed.events
    assert (event.name, event.timestamp) == ("exception", failed.end_time)
    assert event.attributes["exception.type"] == "RuntimeError"
    assert event.attributes["exception.message"] == "no such kernel"
    assert event.attributes["exception.stacktrace"].startswith("Traceback")
    assert absent.attributes["composer.status"] == "unavailable"
    assert absent.status.status_code is StatusCode.UNSET
    assert (absent.events, "error.type" in absent.attributes) == ((), False)
    assert rejected.status.status_code is StatusCode.ERROR
    assert rejected.attributes["error.type"] == "returned_original"
    assert accepted.status.status_code is StatusCode.UNSET
    assert "composer.reason" not in accepted.attributes


def test_candidate_that_is_merely_slower_is_no_error(collected: Collected) -> None:
    """Under ``select = "fastest"`` it was accepted, and right."""
    lazy = FakeBackend("slow", at=1, seconds=0.01)
    compiled(torch.sin, lazy, select={"by": "fastest", "seconds": 1})(torch.ones(3))
    (slower,) = collected.spans("composer.attempt")
    assert slower.attributes["composer.reason"] == "slower"
    assert slower.status.status_code is StatusCode.UNSET
    assert "error.type" not in slower.attributes


def test_compile_that_ends_in_an_error_is_an_error_span(collected: Collected) -> None:
    """Under ``on_exhausted="raise"``."""
    with pytest.raises(BackendCompilerFailed):
        compiled(torch.sin, raises, on_exhausted="raise")(torch.ones(2))
    (root,) = collected.spans("composer.compile")
    assert root.status.status_code is StatusCode.ERROR


def test_compile_span_is_the_child_of_the_callers_span(collected: Collected) -> None:
    """A request that had to wait for a compile shows it."""
    tracer = collected.tracer_provider.get_tracer("service")
    with tracer.start_as_current_span("request") as request:
        compiled(torch.sin, honest)(torch.ones(2))
    (root,) = collected.spans("composer.compile")
    assert root.parent.span_id == request.get_span_context().span_id
    assert root.context.trace_id == request.get_span_context().trace_id


def test_passes_are_events_of_the_compile_span(collected: Collected) -> None:
    """One that was rolled back says why; those before the candidates come before them.

    Those within the candidate stand at the end: when they ran is not known.
    """
    passes = [at("torch", Raises), at("aten", Scale), at("joint", Scale)]
    compiled(torch.cos, honest, passes=passes)(torch.ones(2))
    (root,) = collected.spans("composer.compile")
    (attempt,) = collected.spans("composer.attempt")
    failed, scale, within = root.events
    assert {event.name for event in root.events} == {"composer.pass"}
    assert scale.attributes["composer.pass.name"] == last().passes[1].name
    assert scale.attributes["composer.pass.stage"] == "aten"
    assert "composer.pass.error" not in scale.attributes
    assert "lost the thread" in failed.attributes["composer.pass.error"]
    assert root.start_time <= failed.timestamp <= scale.timestamp <= attempt.start_time
    assert within.attributes["composer.pass.stage"] == "joint"
    assert within.timestamp == root.end_time


def test_metrics_count_attempts_and_time_compiles(collected: Collected) -> None:
    """With units, and buckets in seconds."""
    f = compiled(torch.sin, raises, honest)
    f(torch.ones(2))
    f(torch.ones(2, dtype=torch.float64))
    metrics = collected.metrics()
    assert collected.values("composer.attempts") == {
        ("raises", "build_failed", "failed"): 2,
        ("honest", "succeeded"): 2,
    }
    assert metrics["composer.attempts"].unit == "{attempt}"
    (point,) = metrics["composer.compile.duration"].data.data_points
    assert metrics["composer.compile.duration"].unit == "s"
    assert dict(point.attributes) == {"composer.chosen": "honest"}
    assert point.count == 2
    assert (min(point.explicit_bounds), max(point.explicit_bounds)) == (0.01, 600)
    assert point.exemplars[0].trace_id in {
        span.context.trace_id for span in collected.spans("composer.compile")
    }


@pytest.mark.filterwarnings("ignore::composer.errors.LateCompileWarning")
def test_late_compiles_are_counted(collected: Collected) -> None:
    """By who serves the graph; the first compile is none."""
    alarm = session.current().late_compiles
    f = compiled(torch.sin, honest, dynamic=False)
    for _ in range(100):
        f(torch.ones(2))
    alarm.clock = lambda: time.monotonic() + 100.0
    f(torch.ones(3))
    assert collected.values("composer.compile.late") == {("honest",): 1}


def test_metrics_read_the_live_calls(collected: Collected) -> None:
    """At each export, by backend, without another compile."""
    f, g = compiled(torch.sin, honest), compiled(torch.cos, "eager")
    f(torch.ones(2))
    assert collected.values("composer.runtime.calls") == {("honest",): 1}
    for _ in range(4):
        f(torch.ones(2))
    g(torch.ones(2))
    assert collected.values("composer.runtime.calls") == {("honest",): 5, ("eager",): 1}
    assert collected.values("composer.runtime.fallbacks") == {("honest",): 0, ("eager",): 0}
    assert collected.values("composer.runtime.time")["honest",] > 0
    assert collected.metrics()["composer.runtime.time"].unit == "s"


def test_record_of_a_graph_taken_over_adds_only_what_is_new(collected: Collected) -> None:
    """A span of its own, with the error that led to it, and no attempt counted twice."""
    compiled(torch.sin, raises, honest)(torch.ones(2))
    session.current().sinks.emit(taken_over(last(), "other"), first=False)
    (again,) = collected.spans("composer.recompile")
    assert len(collected.spans("composer.compile")) == 1
    *_, tried = collected.spans("composer.attempt")
    assert tried.parent.span_id == again.context.span_id
    assert tried.attributes["composer.backend"] == "other"
    assert again.end_time - again.start_time == 500_000_000
    assert again.attributes["composer.chosen"] == "other"
    assert [event.attributes["exception.message"] for event in again.events] == ["device lost"]
    assert collected.values("composer.attempts") == {
        ("raises", "build_failed", "failed"): 1,
        ("honest", "succeeded"): 1,
        ("other", "succeeded"): 1,
    }
    (point,) = collected.metrics()["composer.compile.duration"].data.data_points
    assert point.count == 1


def test_takeover_at_run_time_is_one_span(collected: Collected) -> None:
    """With the error that led to it, also where nobody but the eager fallback is left."""
    chain = FakeBackend("raises", at=1), FakeBackend("raises", at=2, name="other")
    f = compiled(torch.sin, *chain)
    for _ in range(4):
        f(torch.ones(2))
    first, second = collected.spans("composer.recompile")
    assert [first.attributes["composer.chosen"], second.attributes["composer.chosen"]] == [
        "other",
        "eager",
    ]
    assert [len(each.events) for each in (first, second)] == [1, 1]


def test_trace_that_is_not_sampled_costs_no_spans() -> None:
    """Metrics go on."""
    sdk = Collected(sampler=ALWAYS_OFF)
    sink = OpenTelemetrySink(sdk.tracer_provider, sdk.meter_provider)
    session.add_sink(sink)
    try:
        compiled(torch.sin, raises, honest)(torch.ones(2))
    finally:
        session.remove_sink(sink)
    assert sdk.exporter.get_finished_spans() == ()
    assert len(sdk.values("composer.attempts")) == 2
    sdk.meter_provider.shutdown()


SERVICE = """
import torch
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import ConsoleMetricExporter, PeriodicExportingMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor
provider = TracerProvider()
line = lambda span: f"span {span.name}\\n"
provider.add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter(formatter=line)))
trace.set_tracer_provider(provider)
read = lambda data: "".join(
    f"metric {m.name} {[getattr(p, 'value', None) for p in m.data.data_points]}\\n"
    for r in data.resource_metrics for s in r.scope_metrics for m in s.metrics
)
reader = PeriodicExportingMetricReader(ConsoleMetricExporter(formatter=read))
metrics.set_meter_provider(MeterProvider([reader]))
f = torch.compile(torch.sin, backend="composer", options={"chain": ["aot_eager"]})
for _ in range(3):
    f(torch.ones(2))
"""


def test_named_in_the_environment_it_uses_the_global_providers(run_python: Any) -> None:
    """The export that the SDK makes at the end of the process has the calls up to it."""
    done = run_python(SERVICE, env={"COMPOSER_SINKS": "opentelemetry"})
    lines = done.stdout.split("\n")
    assert [line for line in lines if line.startswith("span")] == [
        "span composer.attempt",
        "span composer.compile",
    ], done.stderr
    assert "metric composer.attempts [1]" in lines
    assert "metric composer.runtime.calls [3]" in lines


USER = """
import sys
{first}
import torch
f = torch.compile(torch.sin, backend="composer", options={{"chain": ["aot_eager"]}})
print(f(torch.zeros(2)).sum().item())
print(sorted(name for name in sys.modules if name.startswith("opentelemetry.sdk")))
"""


def test_without_an_sdk_it_does_nothing(run_python: Any) -> None:
    """The API alone is a dependency."""
    done = run_python(USER.format(first=""), env={"COMPOSER_SINKS": "opentelemetry"})
    assert done.stdout.split("\n")[:2] == ["0.0", "[]"], done.stderr
    assert "Warning" not in done.stderr


def test_without_the_package_the_extra_is_named(run_python: Any) -> None:
    """In a warning; the program goes on."""
    code = USER.format(first="sys.modules['opentelemetry'] = None")
    done = run_python(code, env={"COMPOSER_SINKS": "opentelemetry"})
    assert done.stdout.startswith("0.0"), done.stderr
    assert "pip install 'torch-compile-composer[opentelemetry]'" in done.stderr
