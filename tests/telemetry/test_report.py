"""The report: a table for a person, plain data for a program."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from pathlib import Path
from typing import Any

import engines
import pytest
import torch
from common import compiled, last
from engines import honest
from recordings import graph, served
from rewrites import Raises, Scale, at

import composer
from composer import session
from composer.telemetry.report import Report
from composer.testing import FakeBackend


def test_an_empty_report_says_so() -> None:
    """Before anything was compiled."""
    assert str(composer.report()) == "composer: nothing was compiled"


def test_the_table_shows_who_ran_and_why_not_the_others() -> None:
    """Graph, model, operations, attempts with status, reason and seconds, engine, calls."""
    f = compiled(torch.nn.Linear(3, 3), engines.raises, honest)
    f(torch.ones(2, 3))
    f(torch.ones(2, 3))
    text = str(composer.report())
    for expected in (
        "1 graph in",
        "served by: honest 1",
        "graph 1 [0/0]  torch.nn.modules.linear.Linear  (1 op, float32 on cpu, training)",
        "runs on honest, 2 calls",
        "build_failed",
        "no such kernel",
        "succeeded",
    ):
        assert expected in text


def test_the_table_counts_the_calls_that_eager_answered_or_was_compared_in() -> None:
    """Where there are any."""
    f = compiled(
        torch.sin, FakeBackend("raises", at=3), honest, verify={"when": "sample", "every": 4}
    )
    for _ in range(12):
        f(torch.ones(2))
    said = "runs on honest, 12 calls, 1 answered by eager, 3 compared with eager\n"
    assert said in str(composer.report())


def test_two_candidates_of_one_engine_are_told_apart_by_their_options() -> None:
    """In the record always, in the table where a chain has the engine twice."""
    chain = [{"backend": "onnxrt", "options": {"threads": n}, "min_coverage": 1.0} for n in (1, 2)]
    unsupported = torch.linalg.eigvalsh
    compiled(lambda x: unsupported(x @ x.T) + 1, *chain, "eager")(torch.eye(3))
    assert [each.engine.get("options") for each in last().attempts] == [
        {"threads": 1},
        {"threads": 2},
        None,
    ]
    text = str(composer.report())
    assert "onnxrt(threads=1)" in text
    assert "onnxrt(threads=2)" in text
    compiled(lambda x: x + 1, chain[0])(torch.ones(2))
    assert "onnxrt(" not in str(composer.report(last=1))


FIGURES = {
    **{"ms": 1.0, "eager_ms": 4.2, "rounds": 9},
    **{"over_eager": 4.1987, "over_eager_p25": 4.1, "over_eager_p75": 4.3},
}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({}, "1 ms a call, 4.20 (4.10-4.30) times as fast as eager in 9 rounds"),
        ({"rounds": 2}, "1 ms a call, about 4.2 times as fast as eager in 2 rounds"),
        ({"rounds": 2, "over_eager": 117.3}, "about 120 times as fast as eager in 2 rounds"),
        ({"under_load": True}, "in 9 rounds; measured under a load"),
    ],
)
def test_the_winners_row_says_how_surely_it_was_measured(more: dict[str, Any], said: str) -> None:
    """A ratio of a few rounds has two digits; a load of other programs is named."""
    winner = served("onnxrt", 1.0).timed(FIGURES | more)
    row = " ".join(str(Report((graph(winner),))).split())
    assert row.endswith(said)


def test_the_table_shows_the_passes() -> None:
    """Stage, matches, operations before and after, seconds, and what went wrong."""
    passes = [at("torch", Raises), at("joint", Scale)]
    compiled(torch.cos, "aot_eager", passes=passes)(torch.ones(2))
    text = str(composer.report())
    for row in (
        r"pass +stage +matches +nodes +seconds +error",
        r"raises +torch +3 -> 3 +0\.\d{3} +pass 'raises' broke the rule 'raises': ValueError",
        r"scale +joint +1 +3 -> 4 +0\.\d{3}",
    ):
        assert re.search(rf"^ +{row}", text, re.MULTILINE), text


def test_the_table_says_times_in_words() -> None:
    """Of what was measured a call and eager's, and when that was; of anything else what it is."""
    made = composer.Attempt("here", composer.Status.SUCCEEDED, None, "", 0.1)
    compiled(torch.cos, "eager")(torch.ones(2))
    measured = {"ms": 0.2123, "eager_ms": 0.881, "rounds": 7, "measured": "2026-11-21T23:58:38Z"}
    for timing, said in (
        (measured, "0.212 ms a call, eager 0.881 ms, as measured on 2026-11-21"),
        ({"ms": 1.5, "eager_ms": 3.0, "mib": 8.0}, "1.5 ms a call and 8 MiB, eager 3 ms"),
        ("no: a training graph", "timing no: a training graph"),
        ({"rounds": 1}, "timing rounds 1"),
    ):
        attempt = dataclasses.replace(made, engine={"timing": timing})
        graph = dataclasses.replace(last(), attempts=(attempt,))
        assert f"{said}\n" in f"{Report((graph,))}\n"


def test_a_record_of_somebody_elses_moves_no_cursor() -> None:
    """And forges no line: it may come from a file."""
    evil = "\x1b]0;owned\x07\x1b[2J\ngraph 9/9  forged"
    attempt = composer.Attempt(evil, composer.Status.FAILED, None, evil, 1.0, engine={"a": evil})
    facts = {
        "time": "",
        "number": 1,
        "graph_id": evil,
        "graph_key": "",
        "model": evil,
        "device": evil,
    }
    more = {"dtype": evil, "training": False, "dynamic": False, "nodes": 1, "seconds": 1.0}
    rest = {"inputs": (), "policy": (), "chosen": evil, "attempts": (attempt,)}
    text = str(Report((composer.CompileReport(**facts, **more, **rest),)))
    assert all(line.isprintable() for line in text.split("\n"))
    assert [line for line in text.split("\n") if line.startswith("graph 9/9")] == []


def test_last_limits_the_report() -> None:
    """The newest graphs only; a negative number is a mistake."""
    for size in (1, 2, 3):
        torch.compiler.reset()
        compiled(torch.sin, "eager")(torch.ones(size))
    assert len(composer.report(last=2).graphs) == 2
    assert composer.report(last=1).graphs[0] is last()
    assert len(composer.report(last=9).graphs) == 3
    assert composer.report(last=0).graphs == ()
    with pytest.raises(ValueError, match="-1"):
        composer.report(last=-1)


def test_records_are_json_by_the_schema() -> None:
    """Every field of version 1, in order, of plain types."""
    compiled(torch.sin, engines.raises, honest)(torch.ones(2))
    record = json.loads(last().to_json())
    assert list(record) == [
        *(
            "schema",
            "time",
            "number",
            "graph_id",
            "graph_key",
            "model",
            "device",
            "dtype",
            "training",
        ),
        *("dynamic", "nodes", "inputs", "policy", "passes", "attempts", "chosen", "ranges"),
        *("seconds", "waited", "recompiled", "late", "dumped", "lock"),
        "runtime",
    ]
    assert record["schema"] == 1
    assert record["policy"] == ["options"]
    counters = dict(record["runtime"])
    assert 0 < counters.pop("seconds") < 1
    expected = {"calls": 1, "fallbacks": 0, "verified": 0, "last_error": ""}
    assert counters == {**expected, "waits": 0, "waited": 0.0, "under_way": ""}
    assert list(record["attempts"][0]) == [
        *("backend", "status", "reason", "message", "seconds", "coverage", "engine"),
        *("error_type", "traceback", "options", "precision", "products_in_fp32", "tentative"),
        "timing",
    ]
    assert record["attempts"][0]["reason"] == "build_failed"
    assert record["attempts"][1]["reason"] is None
    assert json.loads(composer.report().to_json()) == {"graphs": [record], "without_graph": []}
    assert composer.report().to_dict() == {"graphs": [last().to_dict()], "without_graph": []}


class Recurrent(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = torch.nn.LSTM(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x)[0]  # Dynamo follows no LSTM


def breaks_in_a_loop(x: torch.Tensor) -> torch.Tensor:
    for _ in range(2):
        x = x.sin()
        torch._dynamo.graph_break()  # in the loop
    return x


def computes_nothing(number: int) -> int:
    return number + 1


def breaks_first(x: torch.Tensor) -> torch.Tensor:
    torch._dynamo.graph_break()
    return x.sin()


def line_of(text: str) -> int:
    """Where this file has a line that ends so for the first time, from 1."""
    lines = Path(__file__).read_text().splitlines()
    return next(i for i, line in enumerate(lines, 1) if line.endswith(text))


def test_report_says_what_dynamo_captured_no_graph_of() -> None:
    """A module that is skipped, a function that is given up, one without operations."""
    for function, given in (
        (Recurrent(), torch.ones(1, 1, 2)),
        (breaks_in_a_loop, torch.ones(2)),
        (computes_nothing, 1),
        (breaks_first, torch.ones(2)),  # it has a graph behind the break
    ):
        compiled(function, honest)(given)
    assert [each.model for each in composer.reports()] == [f"{__name__}.breaks_first"]
    recurrent, looped, nothing = composer.report().without_graph
    assert recurrent.name == f"{__name__}.Recurrent"
    assert recurrent.line == line_of("# Dynamo follows no LSTM")
    assert recurrent.reason
    assert (looped.name, looped.file) == (f"{__name__}.breaks_in_a_loop", __file__)
    assert looped.line == line_of("# in the loop")
    assert nothing.name == f"{__name__}.computes_nothing"
    assert nothing.reason
    said = f"no graph of {__name__}.Recurrent  ({__file__}:{recurrent.line})\n  {recurrent.reason}"
    assert said in str(composer.report())
    assert composer.report().to_dict()["without_graph"][0]["reason"] == recurrent.reason


def test_report_says_when_dynamo_stops_to_compile_for_new_inputs() -> None:
    """Graphs of the first inputs stay; the others run as plain Python."""
    run = compiled(lambda x, n: x * n, honest, dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=2, specialize_float=True):
        for number in (0.5, 1.5, 2.5):
            run(torch.ones(2), number)
    assert len(composer.reports()) == 2
    (limited,) = composer.report().without_graph
    assert "limit" in limited.reason


def test_what_other_backends_have_no_graph_of_is_not_reported() -> None:
    """Nor what raises: under ``fullgraph`` the program is told."""
    torch.compile(breaks_in_a_loop, backend="eager")(torch.ones(2))
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(breaks_in_a_loop, backend="composer", fullgraph=True)(torch.ones(2))
    assert composer.report().without_graph == ()


def test_a_record_holds_no_tensor_alive() -> None:
    """A thousand reports must not keep a thousand graphs' inputs."""
    import gc
    import weakref

    x = torch.ones(2)
    alive = weakref.ref(x)
    compiled(torch.sin, engines.raises, "eager")(x)
    torch.compiler.reset()
    del x
    gc.collect()
    assert alive() is None
    assert "no such kernel" in last().attempts[0].traceback


def test_statuses_and_reasons_are_strings() -> None:
    """``status == "succeeded"`` holds."""
    assert composer.Status.SUCCEEDED == "succeeded"
    assert f"{composer.Reason.NO_DEVICE}" == "no_device"


def test_reset_forgets_reports_and_keeps_functions_working() -> None:
    """The compiled function lives on."""
    f = compiled(torch.sin, "eager")
    f(torch.ones(2))
    composer.reset()
    assert composer.reports() == ()
    assert torch.equal(f(torch.ones(2)), torch.sin(torch.ones(2)))


def test_notebook_shows_tables() -> None:
    """Of passes and attempts; what a record says is text there, not markup."""

    def fails(gm: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> None:
        raise RuntimeError("no <b>kernel</b>")

    compiled(torch.cos, fails, honest, passes=[at("joint", Scale)])(torch.ones(2))
    shown = composer.report()._repr_html_()
    assert shown.startswith("<p><strong>composer: 1 graph in")
    assert "graph 1 [0/0]  torch.cos  (1 op, float32 on cpu)<br>  runs on honest" in shown
    assert shown.count("<table>") == 2
    assert "<td>build_failed</td>" in shown
    assert "<td>no &lt;b&gt;kernel&lt;/b&gt;</td>" in shown


def test_graphs_are_numbered_uniquely_in_a_process() -> None:
    """Dynamo and composer start anew after their resets, and the numbers go on."""
    for function in (torch.sin, torch.cos, torch.tan):
        compiled(function, honest)(torch.ones(2))
        numbered = last()
        torch.compiler.reset()
        composer.reset()
    assert (numbered.number, numbered.graph_id) == (3, "0/0")


def test_report_is_made_while_another_thread_compiles() -> None:
    """The thread adds an engine between two that the report reads."""
    here, numbers = session.current(), itertools.count()

    class Compiles(str):
        """A name; when it is looked at, another engine is noted."""

        def __hash__(self) -> int:
            here.note_installed([f"engine {next(numbers)}"])
            return str.__hash__(self)

    here.note_installed([Compiles("first"), "second"])
    try:
        assert {"first", "second"} <= set(here.untried())
    finally:
        composer.reset()
