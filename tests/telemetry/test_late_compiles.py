"""A compile that comes when its function had settled: an alarm, a metric, a line in the report."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
from common import compiled, last
from engines import honest
from prometheus_client import CollectorRegistry

import composer
from composer import session
from composer.dispatch import compose
from composer.errors import LateCompileWarning
from composer.records import CompileReport, LateCompile
from composer.telemetry.late_compiles import KEPT_FUNCTIONS, SETTLED_CALLS, SETTLED_SECONDS
from composer.telemetry.prometheus import PrometheusSink
from composer.testing import FakeBackend


class Clock:
    """A clock that stands still until somebody sets it."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    """What the alarm goes by."""
    clock = Clock()
    session.current().late_compiles.clock = clock
    return clock


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def triple(x: torch.Tensor) -> torch.Tensor:
    return x * 3


def settled(function: Any, calls: int = SETTLED_CALLS, **options: Any) -> Any:
    """A compiled function after so many calls with one input."""
    run = compiled(function, honest, dynamic=False, **options)
    for _ in range(calls):
        run(torch.ones(2))
    return run


def test_compile_after_the_function_has_settled_is_an_alarm(clock: Clock) -> None:
    """With Dynamo's reason, and how long the call waited; the report says so too."""
    run = settled(double)
    clock.now = 83.0
    with pytest.warns(LateCompileWarning) as warned:
        run(torch.ones(3))
    report = last()
    assert report.late == LateCompile(100, 83.0)
    assert "size mismatch at index 0. expected 2, actual 3" in report.recompiled
    text = str(warned[0].message)
    assert text.startswith(
        "graph 2 [0/1] of test_late_compiles.double was compiled after 100 calls and 83 s without "
        "a new graph; a call waited "
    )
    assert text.endswith(f"; Dynamo's reason: {report.recompiled}")
    line = "  compiled late, after 100 calls and 83 s without a new graph\n"
    again = "  compiled again, Dynamo's reason: "
    assert f"{line}{again}{report.recompiled}\n" in str(composer.report())


@pytest.mark.parametrize(
    ("calls", "seconds"),
    [(SETTLED_CALLS - 1, 2 * SETTLED_SECONDS), (2 * SETTLED_CALLS, SETTLED_SECONDS - 1)],
    ids=["few calls", "soon"],
)
def test_function_that_has_not_settled_raises_no_alarm(
    calls: int, seconds: float, clock: Clock
) -> None:
    """Warnings are errors in these tests."""
    run = settled(double, calls)
    clock.now = seconds
    run(torch.ones(3))
    assert len(composer.reports()) == 2
    assert last().late is None
    assert last().recompiled


def test_another_model_raises_no_alarm(clock: Clock) -> None:
    """However late the program compiles it."""
    settled(double)
    clock.now = 1000.0
    settled(triple, 1)
    assert last().late is None
    assert last().recompiled == ""


def test_other_code_of_the_same_model_raises_no_alarm(clock: Clock) -> None:
    """A policy may give two functions one name."""
    settled(double, model="served")
    clock.now = 1000.0
    settled(triple, 1, model="served")
    assert last().late is None


def test_alarm_counts_from_the_last_graph(clock: Clock) -> None:
    """So a program that compiles again and again is warned once a minute at most."""
    run = settled(double)
    clock.now = 61.0
    with pytest.warns(LateCompileWarning):
        run(torch.ones(3))
    clock.now = 200.0
    for _ in range(SETTLED_CALLS - 2):
        run(torch.ones(3))
    run(torch.ones(4))
    assert last().late is None


@pytest.mark.parametrize("reset", [composer.reset, torch.compiler.reset], ids=["composer", "torch"])
def test_reset_begins_anew(reset: Any, clock: Clock) -> None:
    """Also where Dynamo counts code from 0 again."""
    settled(double)
    clock.now = 1000.0
    reset()
    settled(double, 1)
    run = compiled(double, honest, dynamic=False)
    run(torch.ones(5))
    assert last().late is None


def test_alarm_in_training(clock: Clock) -> None:
    """A step that has settled, and meets a last batch of another size."""
    net = torch.nn.Linear(2, 2)
    run = compiled(net, honest, dynamic=False)
    for _ in range(SETTLED_CALLS):
        run(torch.ones(4, 2)).sum().backward()
    clock.now = 100.0
    with pytest.warns(LateCompileWarning, match="of torch.nn.modules.linear.Linear"):
        run(torch.ones(3, 2)).sum().backward()
    assert last().training


def test_size_that_became_dynamic_raises_no_further_alarm(clock: Clock) -> None:
    """One late graph serves all later sizes."""
    run = compiled(double, honest)
    for _ in range(SETTLED_CALLS):
        run(torch.ones(2))
    clock.now = 100.0
    with pytest.warns(LateCompileWarning):
        run(torch.ones(3))
    assert last().dynamic
    clock.now = 200.0
    run(torch.ones(7))
    assert len(composer.reports()) == 2


@pytest.mark.filterwarnings("ignore::composer.errors.LateCompileWarning")
def test_metric_counts_late_compiles(clock: Clock) -> None:
    """By who serves the graph."""
    registry = CollectorRegistry()
    sink = PrometheusSink(registry)
    session.add_sink(sink)
    try:
        run = settled(double)
        clock.now = 100.0
        run(torch.ones(3))
        found = registry.get_sample_value("composer_late_compiles_total", {"chosen": "honest"})
    finally:
        session.remove_sink(sink)
    assert found == 1


@pytest.mark.filterwarnings("ignore::composer.errors.LateCompileWarning")
def test_record_can_be_read_back(clock: Clock) -> None:
    """With the alarm in it."""
    run = settled(double)
    clock.now = 100.0
    run(torch.ones(3))
    again = CompileReport.from_dict(json.loads(last().to_json()))
    assert again == last()
    assert again.late == LateCompile(100, 100.0)


def test_record_says_how_long_the_call_waited() -> None:
    """Dynamo's capture included; the report has the sum."""
    settled(double, 1)
    settled(triple, 1)
    waits = [report.waited for report in composer.reports()]
    assert all(report.waited > report.seconds for report in composer.reports())
    assert f" (calls waited 2 times, {sum(waits):.2f} s in all), served by: honest 2" in str(
        composer.report()
    )


def test_calls_that_wait_for_another_engine_are_counted_too() -> None:
    """The second engine is built at the call after the first has failed."""
    f, x = compiled(torch.sin, FakeBackend("raises", at=2), honest), torch.ones(3)
    for _ in range(4):
        assert torch.equal(f(x), x.sin())
    counters = last().runtime.read()
    assert (counters.fallbacks, counters.waits) == (1, 1)
    waited = counters.waited + last().waited
    assert 0.0 < counters.waited < waited
    assert f" (calls waited 2 times, {waited:.2f} s in all), served by: honest 1" in str(
        composer.report()
    )


def test_compile_without_dynamo_is_never_late(clock: Clock) -> None:
    """The program asks for it itself, and there is nothing that it waits for besides composer."""
    gm = torch.fx.symbolic_trace(double)
    run = compose(gm, [torch.ones(2)], options={"chain": [honest]})
    for _ in range(SETTLED_CALLS):
        run(torch.ones(2))
    clock.now = 1000.0
    compose(gm, [torch.ones(2)], options={"chain": [honest]})
    assert (last().late, last().waited, last().recompiled) == (None, None, "")


def test_functions_that_are_followed_are_bounded(clock: Clock) -> None:
    """The oldest is forgotten."""
    settled(double)
    alarm, report = session.current().late_compiles, dataclasses.replace(last(), graph_id="0/1")
    clock.now = 100.0
    assert alarm.judge(report.graph_id, report.model)
    for number in range(KEPT_FUNCTIONS):
        alarm.follow(dataclasses.replace(report, model=str(number)))
    assert alarm.judge(report.graph_id, report.model) is None
