"""``composer.warm_up``: after it, nothing is left to compile, to measure or to put in place."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from common import compiled, last

import composer
from composer import session
from composer.errors import FallbackWarning
from composer.testing import FakeBackend, settle

WAIT = 60.0

unreached = pytest.mark.filterwarnings("ignore:no call of composer.warm_up reached")
"""Of tests that warm up a function which stands for one that composer compiled."""


@pytest.fixture(autouse=True)
def _settled() -> Iterator[None]:
    yield
    settle(WAIT)


def changed() -> None:
    """Put another record in the place of the newest one, as a choice does."""
    report = last()
    number = int(report.recompiled or 0) + 1
    session.current().replace(report, dataclasses.replace(report, recompiled=str(number)))


@pytest.mark.slow
def test_warm_up_ends_with_the_fastest_engine_in_place() -> None:
    """Whoever served at first; the report has the graph, and all of its calls."""
    slow = FakeBackend("slow", at=1, seconds=0.02)
    select = {"by": "fastest", "background": True}
    options = {"chain": [slow, "aot_eager"], "select": select, "verify": "off"}
    f = torch.compile(torch.sin, backend="composer", options=options)
    x = torch.ones(3)
    report = composer.warm_up(f, [(x,)], timeout=WAIT)
    (graph,) = report.graphs
    assert graph.chosen in ("aot_eager", "eager")
    assert graph == last()
    calls = graph.runtime.calls
    assert calls >= 3
    torch.testing.assert_close(f(x), x.sin())
    assert graph.runtime.calls == calls + 1


@unreached
def test_warm_up_makes_a_call_behind_the_end_of_a_choice() -> None:
    """A choice that is made in the background takes over at one of the program's calls."""
    compiled(torch.sin, "eager")(torch.ones(2))
    seen: list[str] = []
    may_choose = threading.Event()

    def choose() -> None:
        assert may_choose.wait(WAIT)
        seen.append("chosen")

    def f() -> None:
        if not seen:  # it is compiled
            changed()
        if len(seen) == 1:
            session.current().background.submit(choose)
        seen.append("call")
        if len(seen) == 2:
            may_choose.set()
        if seen[-2:] == ["chosen", "call"]:
            seen.append("in place")
            changed()

    composer.warm_up(f, [()], timeout=WAIT)
    assert seen == ["call", "call", "chosen", "call", "in place", "call", "call"]


def test_warm_up_takes_positional_and_keyword_arguments_from_any_iterable() -> None:
    """Such as a generator that makes them for several sizes."""

    def shifted(x: torch.Tensor, by: torch.Tensor | None = None) -> torch.Tensor:
        return x + 1 if by is None else x + by

    f = compiled(shifted, "eager", dynamic=False)
    ones = (torch.ones(size) for size in (2, 3))
    calls = (each for x in ones for each in ((x,), {"x": x, "by": x.clone()}))
    report = composer.warm_up(f, calls)
    assert [len(graph.inputs) for graph in report.graphs] == [1, 2, 1, 2]
    assert [graph.runtime.calls for graph in report.graphs] == [3, 3, 3, 3]


def test_warm_up_reports_what_it_compiled_and_no_more() -> None:
    """A graph from before is called and is not named; a function without a graph is."""
    f = compiled(torch.sin, "eager", dynamic=False)
    f(torch.ones(2))
    compiled(torch.cos, "eager")(torch.ones(2))
    report = composer.warm_up(f, [(torch.ones(2),), (torch.ones(3),)])
    assert [graph.inputs[0].shape for graph in report.graphs] == [(3,)]
    assert str(report).startswith("composer: 1 graph in")


@pytest.mark.parametrize("grad", [True, False])
def test_warm_up_compiles_for_the_modes_of_its_caller(grad: bool) -> None:
    """Grad mode, and autocast."""
    layer = compiled(torch.nn.Linear(2, 2), "eager")
    x = torch.ones(1, 2)
    with torch.set_grad_enabled(grad), torch.autocast("cpu", torch.bfloat16):
        (graph,) = composer.warm_up(layer, [(x,)]).graphs
        assert layer(x).dtype == torch.bfloat16
        assert torch.is_grad_enabled() == grad
    assert graph.training == grad
    assert graph.runtime.calls == 4


@pytest.mark.parametrize(
    ("calls", "said"),
    [
        ([torch.ones(2)], r"calls\[0\] is a Tensor, and should be a tuple of positional"),
        ([(torch.ones(2),), [torch.ones(2)]], r"calls\[1\] is a list"),
        ({"x": torch.ones(2)}, r"calls\[0\] is a str"),
    ],
)
def test_arguments_that_are_neither_a_tuple_nor_a_mapping_are_a_mistake(
    calls: Any, said: str
) -> None:
    """Before any call is made."""
    f = compiled(torch.sin, "eager")
    with pytest.raises(TypeError, match=said):
        composer.warm_up(f, calls)
    assert composer.reports() == ()


def test_error_of_a_call_is_raised_with_its_number() -> None:
    """As the call itself raises it."""
    f = compiled(torch.sin, "eager")
    with pytest.raises(TypeError) as caught:
        composer.warm_up(f, [(torch.ones(2),), (torch.ones(2), 3)])
    assert caught.value.__notes__[-1] == "composer.warm_up made call 2 of 2, in round 1"


@unreached
def test_warm_up_gives_up_after_its_timeout() -> None:
    """Before a call, and while something is built in the background."""
    compiled(torch.sin, "eager")(torch.ones(2))
    calls = []
    with pytest.raises(TimeoutError, match=r"no time is left for call 1 of 1, in round 1"):
        composer.warm_up(lambda: calls.append(1), [()], timeout=0)
    assert calls == []
    ended = threading.Event()
    session.current().background.submit(lambda: assert_waited(ended))
    last().runtime.under_way = "onnxrt, 1 of 2"
    left = r"no time is left to choose for graph \d+ \[0/0\] of .*sin \(onnxrt, 1 of 2\)"
    try:
        with pytest.raises(TimeoutError, match=left):
            composer.warm_up(lambda: calls.append(1), [()], timeout=0.2)
    finally:
        ended.set()
    assert calls == [1]


def assert_waited(event: threading.Event) -> None:
    assert event.wait(WAIT)


@unreached
def test_warm_up_of_a_program_that_compiles_at_each_call_has_an_end() -> None:
    """After 20 rounds."""
    compiled(torch.sin, "eager")(torch.ones(2))
    calls = []

    def f() -> None:
        calls.append(1)
        changed()

    composer.warm_up(f, [()])
    assert len(calls) == 20


def test_after_the_warm_up_torch_can_be_told_to_compile_no_more() -> None:
    """In all threads, as the page for services has it; a new dtype is answered by plain torch."""
    f = compiled(torch.sin, "eager")
    composer.warm_up(f, [(torch.ones(2),)])
    answers: list[torch.Tensor] = []
    x = torch.ones(2, dtype=torch.float64)
    with torch.compiler.set_stance("eager_on_recompile"):
        thread = threading.Thread(target=lambda: answers.extend([f(x), f(x.float())]))
        thread.start()
        thread.join()
    assert [each.dtype for each in answers] == [torch.float64, torch.float32]
    assert [graph.runtime.calls for graph in composer.reports()] == [4]


def test_warm_up_of_something_that_is_not_compiled_warns() -> None:
    """Or of nothing at all: the program would believe that it is warm."""
    with pytest.warns(FallbackWarning, match="no call of composer.warm_up reached a graph"):
        report = composer.warm_up(torch.sin, [(torch.ones(2),)])
    assert report.graphs == ()
