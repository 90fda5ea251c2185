"""The HTML report: its numbers, and that no text of a record can do anything on the page."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import engines
import pytest
import torch
from common import compiled
from recordings import FAILED, TRACEBACK, UNAVAILABLE, graph, many, recording, served, timed
from rewrites import Raises, Scale, at

import composer
from composer import Reason, Status
from composer.records import GraphInput, PassRecord
from composer.telemetry.html import render, words
from composer.telemetry.html.effects import effects
from composer.telemetry.html.fallbacks import fallbacks, traces
from composer.telemetry.html.shares import engines as facts_of_engines
from composer.telemetry.html.shares import shares
from composer.telemetry.html.spent import pieces, spent
from composer.telemetry.html.timeline import timeline
from composer.telemetry.html.times import times
from composer.telemetry.recording import Recording

HOSTILE = (
    "</script><script>document.title='taken'</script><img src=x onerror=alert(1)>\"'&{{ 7*7 }}"
)


def real() -> list[Recording]:
    """What a process recorded that tried three engines and two passes."""
    passes = [at("torch", Raises), at("aten", Scale)]
    f = compiled(torch.cos, "tensorrt", engines.raises, engines.honest, passes=passes)
    f(torch.ones(2, 3))
    return [recording(*composer.reports())]


def test_page_tells_what_real_compiles_recorded() -> None:
    """Who serves, who does not and why, the passes, the traceback, the input."""
    page = render(real())
    for expected in (
        "<b>honest</b> serves 1 graph",
        "build_failed",
        "no such kernel",
        "raise RuntimeError(&#34;no such kernel&#34;)",
        "pass &#39;raises&#39; broke the rule",
        "float32[2, 3] on cpu",
    ):
        assert expected in page


def test_page_says_what_was_under_way_and_why_a_graph_was_compiled_again() -> None:
    """In the details of the graph."""
    made = graph(served("onnxrt", 1.0), recompiled="0/0: x is None")
    made.runtime.under_way = "onnxrt, 1 of 2"
    page = render([recording(made)])
    assert "<dt>In the background</dt><dd>onnxrt, 1 of 2</dd>" in page
    assert '<dt>Compiled again</dt><dd class="said">0/0: x is None</dd>' in page


def test_page_asks_nothing_of_the_network() -> None:
    """No address at all stands in it, and its policy allows no source but itself."""
    page = render(many(12))
    assert not re.search(r"(https?:)?//[a-z]", page)
    assert "default-src 'none'" in page
    assert "@import" not in page
    assert "url(" not in page


@pytest.mark.parametrize("recordings", [[], [recording()]], ids=["no process", "no graph"])
def test_page_of_nothing_says_so(recordings: list[Recording]) -> None:
    """An empty file of records is no error."""
    assert "Nothing was compiled" in render(recordings)


def test_page_escapes_every_text_of_a_record() -> None:
    """Wherever it stands: markup is shown as it was written."""
    attempt = replace(
        FAILED,
        backend=HOSTILE,
        message=HOSTILE,
        error_type=HOSTILE,
        traceback=HOSTILE,
        engine={HOSTILE: [HOSTILE], "n": {HOSTILE: 1}},
    )
    one = graph(
        attempt,
        replace(served("x", 1.0), backend=HOSTILE),
        graph_id=HOSTILE,
        graph_key=HOSTILE,
        model=HOSTILE,
        device=HOSTILE,
        dtype=HOSTILE,
        policy=(HOSTILE,),
        inputs=(GraphInput(HOSTILE, "tensor", (HOSTILE,), HOSTILE, HOSTILE),),
        passes=(PassRecord(HOSTILE, HOSTILE, error=HOSTILE),),
    )
    where = recording(one)
    process = replace(where.process, host=HOSTILE, started=HOSTILE)
    page = render([replace(where, process=process)] * 2, means=lambda _: HOSTILE)
    assert page.count("<script") == 1
    assert "<img" not in page
    assert "onerror=alert(1)&gt;&#34;&#39;&amp;{{ 7*7 }}" in page


def test_page_keeps_the_end_of_a_traceback_of_megabytes() -> None:
    """With a note of what is left out; of a long message it has the beginning."""
    long = "".join(f'  File "a.py", line {i}\n' for i in range(250_000)) + "RuntimeError: the end"
    page = render([recording(graph(replace(FAILED, traceback=long, message="why " * 10**6)))])
    assert len(long) > 5_000_000
    assert len(page) < 100_000
    assert "RuntimeError: the end" in page
    assert re.search(r"… \d,\d{3},\d{3} earlier characters are in the record\n  File", page)
    assert "… 3,996,000 more characters are in the record" in page


def test_page_has_equal_tracebacks_once() -> None:
    """Three hundred graphs stay below two megabytes."""
    page = render(many(300))
    assert page.count("RuntimeError: no kernel for aten.roll</pre>") == 1
    assert len(page.encode()) < 2_000_000


def test_page_of_a_thousand_graphs_is_made_in_seconds() -> None:
    """All that a session keeps."""
    page = render(many(1000, processes=4))
    assert 'id="graph-1000"' in page


@pytest.mark.parametrize(
    "one",
    [
        graph(chosen="", seconds=0.0),
        graph(FAILED, chosen=""),
        graph(served("x", float("nan")), seconds=float("inf"), nodes=0, time="yesterday"),
        graph(served("x", -1.0), inputs=(), dtype="", model="", graph_id="", graph_key=""),
        graph(served("x", 1.0), model="a.b" * 5000, passes=(PassRecord("p" * 5000, "aten"),)),
        graph(served("模型", 1.0), model="模型.\ud800\u202e\x00"),
        graph(served("x", 1.0), time="2026-03-01T12:00:00"),
        graph(served("x", 1.0), seconds=1e12),
    ],
    ids=[
        *("nothing tried", "error", "no numbers", "empty", "long", "unicode", "naive time"),
        "before the calendar",
    ],
)
def test_page_takes_any_record(one: composer.CompileReport) -> None:
    """However odd, beside another graph or alone, and the page can be written as UTF-8."""
    for recordings in ([recording(one)], [recording(one, one), recording(graph(), pid=2)]):
        page = render(recordings)
        assert "</html>" in page
        assert page.encode()


def test_reasons_are_explained_by_whoever_knows() -> None:
    """Each beside its code."""
    page = render([recording(graph(UNAVAILABLE))], means=lambda reason: f"it means {reason}")
    assert "it means no_device" in page


def test_shares_follow_coverage_and_add_up_to_all() -> None:
    """What an engine leaves to torch is eager's, and a graph that nobody serves counts for none."""
    graphs = [
        graph(served("inductor", 1.0), nodes=100, calls=10, run=1.0),
        graph(served("onnxrt", 1.0, coverage=0.75), nodes=200, calls=30, run=2.0),
        graph(FAILED, nodes=20, calls=0),
        graph(FAILED, nodes=999, chosen=""),
    ]
    found = shares(graphs)
    assert [(s.engine, s.graphs, s.nodes, s.calls, s.seconds) for s in found] == [
        ("onnxrt", 1, 150.0, 30, 2.0),
        ("inductor", 1, 100.0, 10, 1.0),
        ("eager", 1, 70.0, 0, 0.0),
    ]
    assert [s.seconds_percent for s in found] == [66.7, 33.3, 0.0]
    assert [s.calls_percent for s in found] == [75.0, 25.0, 0.0]


def test_shares_of_odd_numbers_are_none() -> None:
    """A record may come from anybody's file."""
    odd = graph(served("onnxrt", 1.0, coverage=math.nan), nodes=10, calls=1, run=1e308)
    found = {each.engine: each for each in shares([odd, odd])}
    assert (found["onnxrt"].nodes, found["eager"].nodes) == (0.0, 20.0)
    assert found["onnxrt"].seconds == 0.0


@pytest.mark.parametrize("graphs", [1, 2, 3, 7, 300])
def test_shares_add_up_to_a_hundred_per_cent(graphs: int) -> None:
    """As they are printed, however they are rounded."""
    found = shares(graph for each in many(graphs) for graph in each.report.graphs)
    for column in ("nodes_percent", "calls_percent", "seconds_percent"):
        assert sum(getattr(each, column) for each in found) == pytest.approx(100)


def test_shares_give_calls_that_the_floor_answered_to_eager() -> None:
    """The run-time guard counts them."""
    one = graph(served("x", 1.0), calls=10)
    one.runtime.fallbacks = 4
    assert [(s.engine, s.calls) for s in shares([one])] == [("x", 6), ("eager", 4)]


def test_engines_say_what_all_their_attempts_agree_on() -> None:
    """A version, but not the number of nodes of one graph."""
    one, two = (
        replace(served("onnxrt", 1.0), engine={"onnxruntime": "1.31", "nodes": n, "p": ["A", "B"]})
        for n in (1, 2)
    )
    (found,) = facts_of_engines([graph(one), graph(two)])
    assert found.facts == (("onnxruntime", "1.31"), ("p", "A, B"))


def test_fallbacks_count_by_reason() -> None:
    """The most frequent first, with who said no and what they said most."""
    other = replace(UNAVAILABLE, backend="rtx", message="no driver")
    found = fallbacks([graph(UNAVAILABLE, FAILED), graph(UNAVAILABLE, other, served("x", 1.0))])
    first, second = found
    assert (first.reason, first.attempts, first.graphs) == (Reason.NO_DEVICE, 3, 2)
    assert first.backends == (("tensorrt", 2), ("rtx", 1))
    assert (first.message, first.others) == ("no GPU", 1)
    assert (second.reason, second.seconds) == (Reason.EXPORT_FAILED, 0.4)


def test_measured_times_are_bars_by_eagers() -> None:
    """Its line is in the middle; a bar ends at twice eager's time."""
    slow, fast = timed(UNAVAILABLE, 9.0, 2.0), timed(served("x", 1.0), 0.5, 2.0)
    found = times(graph(UNAVAILABLE, slow, fast, timed(served("eager", 1.0), 2.0, 2.0)))
    assert found is not None
    assert found.eager == pytest.approx(0.002)
    assert [(e.engine, e.status, e.ratio, e.percent) for e in found.engines] == [
        ("tensorrt", "unavailable", 4.5, 100.0),
        ("x", "succeeded", 0.25, 12.5),
    ]
    page = render([recording(graph(slow, fast))])
    assert '<i class="succeeded" style="width:12.50%">' in page
    assert "Measured times" not in render([recording(graph(FAILED))])


def test_measured_times_say_who_was_measured_and_how_surely() -> None:
    """Two candidates of one engine are told apart; few rounds give two digits; a load is named."""
    inductors = [
        replace(timed(each, 1.234, 2.0), options={"freezing": freezing})
        for each, freezing in ((UNAVAILABLE, False), (served("tensorrt", 1.0), True))
    ]
    inductors[1].engine["timing"] |= {"rounds": 9, "under_load": True}
    found = times(graph(*inductors))
    assert found is not None
    names = ["tensorrt(freezing=False)", "tensorrt(freezing=True)"]
    assert [each.engine for each in found.engines] == names
    page = render([recording(graph(*inductors))])
    assert '<td class="number">about 0.62</td>' in page
    assert '<td class="number">0.62</td>' in page
    assert "eager 2 ms; measured under a load</span>" in page
    del inductors[1].engine["timing"]["under_load"]
    assert "measured under a load" not in render([recording(graph(*inductors))])


@pytest.mark.parametrize("odd", [math.nan, math.inf, -1.0, 0, 10**300, "soon", None])
def test_times_that_cannot_be_are_none(odd: Any) -> None:
    """A record may come from anybody's file."""
    assert times(graph(timed(FAILED, odd), timed(FAILED, 1.0, odd))) is None


def test_traces_are_told_once() -> None:
    """The most frequent first, numbered from 1."""
    rare = replace(FAILED, traceback="rare", backend="x")
    found = traces([graph(rare, FAILED), graph(FAILED)])
    assert [(t.number, t.attempts, t.backends) for t in found.values()] == [
        (1, 2, ("onnxrt",)),
        (2, 1, ("x",)),
    ]
    assert found[TRACEBACK].message == "no kernel for aten.roll"


def test_effects_add_up_over_graphs() -> None:
    """Nodes only of the graphs that a pass changed; matches only where they are counted."""
    fold = PassRecord("fold", "aten", True, 2, 10, 8, 0.5)
    idle = PassRecord("fold", "aten", False, 0, 50, 50, 0.5)
    broken = PassRecord("lose", "torch", seconds=0.1, error="it broke a rule\nhere")
    one, two = effects([graph(passes=(fold, broken)), graph(passes=(idle, fold))])
    assert (one.name, one.runs, one.changed, one.matches) == ("fold", 3, 2, 4)
    assert (one.nodes_before, one.nodes_after, one.seconds) == (20, 16, 1.5)
    assert (two.matches, two.errors, two.error) == (None, 1, "it broke a rule")


def test_pieces_account_for_the_whole_compile() -> None:
    """Passes before the candidates, each candidate, the rest; a late pass is in its candidate."""
    passes = PassRecord("a", "aten", seconds=0.5), PassRecord("b", "joint", seconds=0.2)
    one = graph(FAILED, served("x", 1.0), passes=passes, seconds=2.0)
    assert [(p.kind, p.name, round(p.seconds, 3)) for p in pieces(one)] == [
        ("passes", "shared passes", 0.5),
        ("failed", "onnxrt", 0.4),
        ("succeeded", "x", 1.0),
        ("rest", "composer", 0.1),
    ]
    totals = spent([pieces(one), pieces(one)])
    assert [(t.name, t.pieces, t.percent) for t in totals][:2] == [
        ("x", 2, 50.0),
        ("shared passes", 2, 25.0),
    ]
    assert sum(each.percent for each in totals) == pytest.approx(100)


def test_timeline_lays_graphs_out_by_time() -> None:
    """Two processes share the axis; a bar is as wide as its compile was long."""
    line = timeline(
        [graph(served("x", 4.0), ended=4), graph(served("x", 2.0), ended=8, seconds=4.0)]
    )
    assert [(round(b.left, 2), round(b.width, 2), b.alone) for b in line.bars] == [
        (0, 50, 100),
        (50, 50, 100),
    ]
    assert [tick.seconds for tick in line.ticks[0]] == [0, 2, 4, 6]
    assert line.ended - line.began == pytest.approx(8)
    assert line.waits == ()


def test_timeline_cuts_long_waits_short() -> None:
    """An hour between two compiles of a second takes a small part of the axis."""
    line = timeline([graph(served("x", 1.0), ended=1), graph(served("x", 1.0), ended=3602)])
    (wait,) = line.waits
    assert wait.cut
    assert wait.seconds == pytest.approx(3600)
    assert 3 < wait.width < 5
    assert [round(bar.width, 1) for bar in line.bars] == [48.1, 48.1]
    assert all(0 <= tick.left <= 100 for level in line.ticks for tick in level)


def test_timeline_stays_on_the_axis() -> None:
    """Whatever happened when: all bars, waits and ticks lie within it, in every level of detail."""
    for recordings in (many(300), many(40, processes=8)):
        line = timeline([graph for each in recordings for graph in each.report.graphs])
        for bar in line.bars:
            assert -1e-6 <= bar.left <= bar.left + bar.width <= 100 + 1e-6
            assert sum(map(bar.share, bar.pieces)) == pytest.approx(100)
        assert sum(wait.width for wait in line.waits) <= 25
        assert 2 <= len(line.ticks[0]) <= 9
        assert len(line.ticks[0]) < len(line.ticks[1]) < len(line.ticks[2])


def test_timeline_of_compiles_without_length_is_no_error() -> None:
    """All at the same moment, or some seconds apart."""
    for apart in (0, 5):
        instant = [graph(served("x", 0.0), ended=apart * i) for i in range(3)]
        assert all(0 <= bar.left <= 100 for bar in timeline(instant).bars)
    assert timeline([]).bars == ()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.00012, "0.12 ms"),
        (0.0099, "9.9 ms"),
        (0.412, "412 ms"),
        (0.9996, "1.00 s"),
        (12.34, "12.3 s"),
        (99.96, "1 min 40 s"),
        (125, "2 min 05 s"),
        (3725, "1 h 02 min"),
    ],
)
def test_durations_have_the_unit_that_fits(seconds: float, text: str) -> None:
    """Three digits are enough for a person."""
    assert words.duration(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (0.05, "0.05 s"), (180, "3 min"), (4815, "1 h 20 min 15 s")]
)
def test_clock_writes_round_numbers_in_full(seconds: float, text: str) -> None:
    """Ticks of the timeline are such."""
    assert words.clock(seconds) == text


@pytest.mark.parametrize("status", Status)
def test_every_status_has_a_look(status: Status) -> None:
    """A colour, and for all but the accepted one a pattern: colour alone says nothing to some."""
    styles = re.findall(r"^([.\w, ]+) { (background-color.*) }$", render(many(1)), re.MULTILINE)
    (look,) = (rule for names, rule in styles if f".{status}" in names.split(", "))
    assert ("background-image" in look) == (status is not Status.SUCCEEDED)
