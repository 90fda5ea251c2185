"""``composer.explain``: what was compiled, who serves it, where Dynamo could not follow."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from traceback import FrameSummary

import engines
import pytest
import torch
from common import compiled, needs_torch
from engines import honest
from rewrites import Scale, at

import composer
from composer.graphs.capture import users_frame
from composer.testing import FakeBackend
from composer.tools.explain import Explanation, collecting


def breaks(x):
    y = torch.sin(x)
    torch._dynamo.graph_break()
    return torch.cos(y)


def branches(x):
    if x.sum() > 0:
        return torch.sin(x)
    return torch.cos(x)


def breaks_in_a_loop(x):
    for _ in range(3):
        x = torch.sin(x)
        torch._dynamo.graph_break()
    return x


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(3, 3)

    def forward(self, x):
        return self.up(x)


def line_of(text: str) -> int:
    """Where this file has a line for the first time, from 1."""
    lines = [line.strip() for line in Path(__file__).read_text().splitlines()]
    return lines.index(text) + 1


def explained(fn, *args, **kwargs) -> Explanation:
    with composer.using(chain=[honest]):
        return composer.explain(fn, *args, **kwargs)


def test_explanation_has_graphs_breaks_attempts_and_passes() -> None:
    """All of one call; the graphs are reports, and live."""
    with composer.using(chain=[engines.raises, honest], passes=[at("joint", Scale)]):
        found = composer.explain(breaks, torch.ones(3))
    assert [graph.chosen for graph in found.graphs] == ["honest", "honest"]
    assert found.graphs == composer.reports()
    assert [graph.runtime.calls for graph in found.graphs] == [1, 1]
    assert [a.backend for a in found.attempts] == ["raises", "honest"] * 2
    assert [each.name for each in found.passes] == ["scale", "scale"]
    (met,) = found.graph_breaks
    assert (met.file, met.line) == (__file__, line_of("torch._dynamo.graph_break()"))
    assert met.code == "torch._dynamo.graph_break()"
    assert "graph_break" in met.reason
    assert not met.frame_skipped


def test_break_that_no_operation_precedes_is_found() -> None:
    """No graph ends there, so none carries its reason."""
    found = explained(lambda x: breaks_first(x), torch.ones(3))
    assert len(found.graphs) == 1
    assert [each.code for each in found.graph_breaks] == ["torch._dynamo.graph_break()"]


def breaks_first(x):
    torch._dynamo.graph_break()
    return torch.sin(x)


def test_break_in_a_condition_is_the_users_line() -> None:
    """The line of the ``if``, and what Dynamo says of it."""
    found = explained(branches, torch.ones(3))
    (met,) = found.graph_breaks
    assert met.line == line_of("if x.sum() > 0:")
    assert met.reason == "Data-dependent branching"
    assert "torch.cond" in met.message


def test_function_that_is_given_up_is_reported() -> None:
    """It has no graph at all; also when it was compiled, and given up, before."""
    compiled(breaks_in_a_loop, honest)(torch.ones(3))
    found = explained(breaks_in_a_loop, torch.ones(3))
    (met,) = found.graph_breaks
    assert (found.graphs, met.frame_skipped) == ((), True)
    assert [(each.file, each.line) for each in found.without_graph] == [(met.file, met.line)]
    assert met.code == "torch._dynamo.graph_break()"
    assert "nothing was compiled; 1 graph break" in str(found)
    assert "the whole function was given up" in str(found)


def test_break_that_is_met_twice_is_shown_once() -> None:
    """A caller with a loop is given up for it, then the function is traced by itself."""

    def prints(x):
        y = torch.sin(x)
        torch._dynamo.graph_break()
        return y + 1

    def calls_it_in_a_loop(x):
        for _ in range(2):
            x = prints(torch.cos(x))
        return x

    found = explained(calls_it_in_a_loop, torch.ones(3))
    (met,) = found.graph_breaks
    assert (met.code, met.frame_skipped) == ("torch._dynamo.graph_break()", True)
    assert str(found).count("graph break  ") == 1


def test_what_has_no_operation_is_explained() -> None:
    """There is no graph and no break: Dynamo says why it skips it, each time it is asked."""

    def adds(number):
        return number + 1

    for _ in range(2):
        found = explained(adds, 1)
        (without,) = found.without_graph
        assert (without.name, found.graphs) == (f"{__name__}.{adds.__qualname__}", ())
        assert f"no graph of {without}" in str(found)
        assert found.to_dict()["without_graph"][0]["reason"] == without.reason


def test_generator_is_given_up() -> None:
    """Dynamo says no before it traces a line; the place is the function's first."""

    def generates(x):
        yield torch.sin(x)

    (met,) = explained(generates, torch.ones(3)).graph_breaks
    assert (met.code, met.frame_skipped) == ("def generates(x):", True)
    assert met.reason == "Attempt to trace generator"


def test_place_of_a_break_within_torch_is_the_callers() -> None:
    """``torch.nn.LSTM`` alone: every frame that is traced is torch's."""
    lstm = torch.nn.LSTM(2, 2)
    found = explained(lstm, torch.ones(1, 1, 2))
    assert found.graph_breaks
    assert {each.file for each in found.graph_breaks} == {__file__}


def test_text_shows_tables_places_and_reasons() -> None:
    """For a person: the tables of the report, then file, line, source and what Dynamo says."""
    text = str(explained(breaks, torch.ones(3)))
    for expected in (
        "composer: 2 graphs in",
        "served by: honest 2; 1 graph break",
        "test_explain.breaks  (1 op, float32 on cpu)",
        f"graph break  {__file__}:{line_of('torch._dynamo.graph_break()')}",
        "  torch._dynamo.graph_break()\n",
        "Hint: Remove the `torch._dynamo.graph_break()` call.",
    ):
        assert expected in text


@pytest.mark.slow
def test_text_lists_what_is_left_to_torch() -> None:
    """Each operator with the reason and the line, as the engine says it."""

    def partly(x):
        return torch.special.bessel_j0(torch.sin(x)) + torch.cos(x)

    with composer.using(chain=["onnxrt"]):
        found = composer.explain(partly, torch.ones(3))
    text = str(found)
    assert "75%" in text
    assert "onnxrt leaves to torch:\n     prims.bessel_j0.default (no ONNX translation) at" in text


def test_notebook_shows_tables_and_breaks() -> None:
    """The graphs as in the report, each break below them."""
    shown = explained(breaks, torch.ones(3))._repr_html_()
    assert "served by: honest 2; 1 graph break</strong>" in shown
    assert shown.count("<table>") == 2
    assert f"<pre>graph break  {__file__}:" in shown


def test_json_has_records_and_breaks() -> None:
    """Each graph's record as in the report."""
    found = explained(breaks, torch.ones(3))
    read = json.loads(found.to_json())
    assert read["graphs"] == [graph.to_dict() for graph in found.graphs]
    (met,) = read["graph_breaks"]
    assert list(met) == ["reason", "file", "line", "code", "message", "frame_skipped"]


def test_what_was_compiled_before_stays_and_is_not_used() -> None:
    """Neither engine serves the other's calls, and nothing is compiled again afterwards."""
    f = compiled(breaks, "aot_eager")
    f(torch.ones(3))
    found = explained(breaks, torch.ones(3))
    assert [graph.chosen for graph in found.graphs] == ["honest", "honest"]
    f(torch.ones(3))
    assert len(composer.reports()) == 4
    assert [r.runtime.calls for r in composer.reports()] == [2, 2, 1, 1]


@needs_torch("2.13", "it counts all that has the function's code")
def test_explaining_often_does_not_use_up_the_recompiles_of_a_function() -> None:
    """Dynamo allows 8; each explanation counts for itself."""
    for _ in range(torch._dynamo.config.recompile_limit + 2):
        assert len(explained(torch.nn.Tanh(), torch.ones(2)).graphs) == 1


def test_compiled_function_keeps_what_it_was_compiled_with() -> None:
    """Options, ``dynamic`` and ``fullgraph``; a module compiled in place, too."""
    f = compiled(branches, "aot_eager", dynamic=True)
    found = composer.explain(f, torch.ones(3))
    assert {graph.chosen for graph in found.graphs} == {"aot_eager"}
    assert all(graph.dynamic for graph in found.graphs)
    in_place = Net()
    in_place.compile(backend="composer", options={"chain": ["aot_eager"]})
    for model in (compiled(Net(), "aot_eager"), in_place):
        (graph,) = composer.explain(model, torch.ones(2, 3)).graphs
        assert graph.chosen == "aot_eager"
        assert graph.model == "test_explain.Net"
    whole = torch.compile(breaks, backend="composer", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        composer.explain(whole, torch.ones(3))


def test_function_of_another_backend_is_refused() -> None:
    """What composer would do with it is not what runs."""
    with pytest.raises(ValueError, match="backend='aot_eager', of which composer knows nothing"):
        composer.explain(torch.compile(breaks, backend="aot_eager"), torch.ones(3))


def test_error_of_the_function_reaches_the_caller_with_what_was_seen() -> None:
    """As a note, which Python prints below the error."""

    def fails(x):
        breaks(x)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as caught:
        explained(fails, torch.ones(3))
    (note,) = caught.value.__notes__
    assert note.startswith("composer.explain had seen so far:\ncomposer: 2 graphs in")


def test_explanation_shows_a_graph_as_it_stands() -> None:
    """After its engine failed at the call."""
    with composer.using(chain=[FakeBackend("raises", at=1), honest]):
        found = composer.explain(torch.sin, torch.ones(3))
    (graph,) = found.graphs
    assert [str(each.status) for each in graph.attempts] == ["failed"]
    assert graph.chosen == "eager"
    assert found.graphs == composer.reports()


def test_frame_of_a_package_whose_name_begins_with_torch_is_the_users() -> None:
    """It lies beside torch, not within."""
    torchs = Path(torch.__file__).parent
    places = [Path(__file__), torchs.with_name("torchvision") / "ops.py", torchs / "nn.py"]
    stack = [FrameSummary(str(place), 1, "f") for place in places]
    assert users_frame(stack).filename == str(places[1])


def test_function_is_called_once_with_its_arguments() -> None:
    """What it writes to is written to once."""
    total = torch.zeros(1)

    def adds(x, *, times):
        total.add_(x.sum() * times)

    explained(adds, torch.ones(3), times=2)
    assert total.item() == 6


def test_other_threads_are_not_in_an_explanation() -> None:
    """They are in what is collected of the whole process, as ``composer run --breaks`` does."""

    @torch.compiler.disable
    def compile_elsewhere():
        worker = threading.Thread(target=compiled(torch.cos, honest), args=(torch.ones(5),))
        worker.start()
        worker.join()

    def with_a_thread(x):
        compile_elsewhere()
        return torch.sin(x)

    with collecting() as everything:
        found = explained(with_a_thread, torch.ones(3))
    assert len(found.graphs) == 1
    assert len(everything.explanation.graphs) == 2


def test_explanation_of_nothing_says_so() -> None:
    """A function without tensors."""
    found = str(composer.explain(len, [1]))
    assert found.startswith("composer: nothing was compiled; 0 graph breaks\n\nno graph of ")
