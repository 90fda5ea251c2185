"""Totals over all graphs: by backend, never going down, in bounded memory."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from common import compiled, last
from engines import honest, raises
from recordings import taken_over

from composer import CompileReport
from composer.records import Counters, Runtime
from composer.telemetry import totals
from composer.telemetry.totals import News, Total, Totals


def graph(number: int, chosen: str = "honest", **counters: Any) -> CompileReport:
    """A report of its own, with these counters."""
    compiled(torch.sin, "eager")(torch.ones(2))
    runtime = Runtime(Counters(**counters))
    return dataclasses.replace(last(), number=number, chosen=chosen, runtime=runtime)


def test_totals_are_read_from_the_live_graphs() -> None:
    """Summed by backend; a graph whose compile ended in an error has none."""
    kept = Totals()
    first, second = graph(1, calls=2), graph(2, calls=3, fallbacks=1, seconds=0.25)
    for report in (first, second, graph(3, "other", calls=7), graph(4, "")):
        kept.follow(report)
    assert kept.read() == {"honest": Total(5, 1, 250_000_000), "other": Total(7)}
    first.runtime.tick()
    assert kept.read()["honest"].calls == 6
    assert kept.read()["honest"].seconds == 0.25


def test_totals_keep_what_a_dropped_graph_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the newest graphs, memory stays as it is and no total goes down."""
    monkeypatch.setattr(totals, "KEPT_GRAPHS", 2)
    kept = Totals()
    oldest = graph(0, calls=1, seconds=0.1)
    kept.follow(oldest)
    for number in range(1, 5):
        kept.follow(graph(number, calls=1, seconds=0.1))
        assert kept.read()["honest"].calls == number + 1
    oldest.runtime.tick()
    assert kept.read() == {"honest": Total(5, 0, 500_000_000)}


def test_graph_of_long_ago_is_known_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its attempts are not counted again when another engine takes it over."""
    monkeypatch.setattr(totals, "KEPT_GRAPHS", 1)
    kept = Totals()
    reports = [graph(number) for number in range(3)]
    for report in reports:
        kept.follow(report)
        kept.take(report.to_dict())
    assert not kept.take(reports[0].to_dict()).first


def test_totals_after_close_stay_where_they_are() -> None:
    """Whatever the graphs do."""
    kept = Totals()
    report = graph(1, calls=2)
    kept.follow(report)
    kept.close()
    report.runtime.tick()
    assert kept.read()["honest"].calls == 2


def test_totals_of_a_graph_taken_over_are_split_between_the_engines() -> None:
    """Calls up to then are the one's, those after it the other's; attempts are told apart."""
    kept = Totals()
    compiled(torch.sin, raises, honest)(torch.ones(2))
    report = last()
    kept.follow(report)
    record = report.to_dict()
    assert kept.take(record) == News(first=True, attempts=tuple(record["attempts"]))
    later = taken_over(report, "other").to_dict()
    new = (later["attempts"][2],)
    assert kept.take(later) == News(False, known=2, attempts=new, raised=1, takeover=True)
    assert kept.take(later) == News(first=False, known=3)
    report.runtime.tick()
    report.runtime.tick()
    assert {name: total.calls for name, total in kept.read().items()} == {"honest": 1, "other": 2}


def test_totals_know_nothing_of_a_graph_that_was_never_followed() -> None:
    """A sink that was added later: all its attempts are new."""
    compiled(torch.sin, honest)(torch.ones(2))
    kept = Totals()
    record = last().to_dict()
    assert kept.take(record) == News(first=True, attempts=tuple(record["attempts"]))
    assert kept.read() == {}


def test_totals_are_added_and_taken_from_each_other() -> None:
    """Calls, fallbacks and time alike: no graph's count goes down when another is let go."""
    one, two = Total(5, 3, 70), Total(2, 1, 30)
    assert one + two == Total(7, 4, 100)
    assert one - two == Total(3, 2, 40)
