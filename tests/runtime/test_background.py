"""In the background: eager answers, and a sandbox finds out which engine is to serve."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import engines
import pytest
import torch
from common import in_child, last

import composer
from composer import session
from composer.chain.sandbox import Undecided
from composer.chain.select.decision import Decision
from composer.knowledge.verdict import Verdict
from composer.records import Attempt, Reason, Status
from composer.runtime import background
from composer.system import disk, hardware
from composer.system.background import Allowance, Worker
from composer.system.subprocesses import Unwanted
from composer.testing import FakeBackend, expect, settle

pytestmark = pytest.mark.filterwarnings("ignore::composer.errors.FallbackWarning")

SLOW = pytest.mark.slow
"""A sandbox is started."""

WAIT = 60.0
FASTEST = {"by": "fastest", "background": True}
TIMED = {"ms": 1.0, "ratio": 1.0, "rounds": 9, "eager_ms": 2.0, "seconds": 0.1, "least_ms": 1.0}


@pytest.fixture(autouse=True)
def _settled() -> Iterator[None]:
    yield
    settle(WAIT)


class Sandbox:
    """Stands for the sandbox that decides.

    Attributes:
        decision: What it decides.
        may_end: It waits for this.
        inputs: The inputs of the calls that it was asked for.
        unwanted: It was told that nobody waits for it any more.
        began: It was asked.
    """

    def __init__(self) -> None:
        self.decision: Decision | Undecided | None = None
        self.may_end = threading.Event()
        self.may_end.set()
        self.inputs: list[Any] = []
        self.unwanted = threading.Event()
        self.began = threading.Event()

    def __call__(
        self,
        request: Any,
        entries: Any,
        *_: Any,
        is_wanted: Callable[[], bool],
        show: Callable[[str], object],
        **__: Any,
    ) -> Any:
        show("slow, 1 of 2, in a child process")
        self.inputs.append(request.example_inputs)
        self.began.set()
        while not self.may_end.wait(0.01):
            if not is_wanted():
                self.unwanted.set()
                raise Unwanted
        assert self.decision is not None
        if isinstance(self.decision, Undecided):
            return self.decision
        names = [each.candidate.name for each in entries]
        of_chain = zip(self.decision.attempts, names, strict=False)
        named = tuple(dataclasses.replace(each, backend=name) for each, name in of_chain)
        return dataclasses.replace(self.decision, attempts=named)

    def decides(
        self, *ranking: int, places: int = 2, under_load: bool = False, lasts: bool = True
    ) -> None:
        """Have it decide for the candidates at these places, best first."""
        timing = TIMED | ({"under_load": True} if under_load else {})
        attempts = [self._attempt(place, ranking).timed(timing) for place in range(places)]
        self.decision = Decision(tuple(attempts), ranking, lasts)

    def _attempt(self, place: int, ranking: tuple[int, ...]) -> Attempt:
        if ranking[:1] == (place,):
            return Attempt("x", Status.SUCCEEDED, None, "", 2.0)
        return Attempt("x", Status.NOT_CHOSEN, Reason.SLOWER, "slower", 2.0)


@pytest.fixture
def sandbox(monkeypatch: pytest.MonkeyPatch) -> Sandbox:
    made = Sandbox()
    monkeypatch.setattr(background.sandbox, "decide", made)
    return made


def beside(function: Any, *chain: Any, **options: Any) -> Any:
    """Compile with a selection in the background."""
    dynamic = options.pop("dynamic", None)
    options = {"chain": list(chain), "verify": "off", "select": FASTEST} | options
    return torch.compile(function, backend="composer", options=options, dynamic=dynamic)


def test_eager_answers_until_the_choice_is_loaded_at_one_call(sandbox: Sandbox) -> None:
    """Nothing is built before that, and then the winner alone. The report follows."""
    slow, quick = FakeBackend(name="slow"), FakeBackend(name="quick")
    sandbox.decides(1, 0)
    sandbox.may_end.clear()
    x = torch.randn(3)
    f = beside(torch.sin, slow, quick)
    with expect(graphs=1, calls=5, fallbacks=0):
        for _ in range(3):
            assert torch.equal(f(x), x.sin())
        assert last().chosen == "eager"
        assert {each.status for each in last().attempts} == {"skipped"}
        assert slow.compiles + quick.compiles == 0
        sandbox.may_end.set()
        settle()
        assert quick.compiles == 0
        for _ in range(2):
            assert torch.equal(f(x), x.sin())
    assert (slow.compiles, quick.compiles) == (0, 1)
    assert last().chosen == "quick"
    assert [str(each.status) for each in last().attempts] == ["not_chosen", "succeeded"]
    assert last().attempts[1].timing == TIMED
    assert last().attempts[1].engine["built_apart"] == {"seconds": 2.0}


class Scaled(torch.nn.Module):
    """A float that a kernel takes as a number, and one that a tensor may stand for."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 0.3

    def forward(self, x: torch.Tensor, factor: float) -> torch.Tensor:
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(x, x, x, scale=self.scale) * factor


def test_floats_that_kernels_take_are_constants_of_what_the_sandbox_gets(sandbox: Sandbox) -> None:
    """AOTAutograd would have Dynamo capture the graph anew, which a sandbox cannot do."""
    sandbox.decides(0)
    model, x = Scaled(), torch.randn(2, 3, 4, 8)
    f = beside(model, FakeBackend(), dynamic=True)
    for factor in (0.5, 1.5, 2.5):
        torch.testing.assert_close(f(x, factor), model(x, factor))
    settle()
    assert len(composer.reports()) == 1  # the other float is still an input
    (inputs,) = sandbox.inputs
    assert [each for each in inputs if isinstance(each, torch.Tensor) and not each.dim()] == [1.5]
    model.scale = 0.7
    torch.testing.assert_close(f(x, 2.5), model(x, 2.5))
    assert len(composer.reports()) == 2


@pytest.mark.parametrize(
    "function",
    [lambda x, s: s - x, lambda x, s: torch.clamp(x, max=s), lambda x, s: x.sin() / s],
    ids=["subtracted from", "a bound", "a divisor"],
)
def test_engine_that_is_built_at_a_call_keeps_no_float_of_that_call(function: Any) -> None:
    """There is no compile of Dynamo then, which could guard it."""
    options = {"chain": [FakeBackend("raises", at=2), "aot_eager"]}
    f, x = (
        torch.compile(function, backend="composer", options=options, dynamic=True),
        torch.randn(5),
    )
    for number in (0.5, 0.5, 0.5, 0.25, 2.0):
        torch.testing.assert_close(f(x, number), function(x, number))


@SLOW
def test_graph_with_floats_is_measured_in_a_sandbox() -> None:
    """By an engine that AOTAutograd prepares the graph for."""
    model, x = Scaled(), torch.randn(2, 3, 4, 8)
    f = beside(model, "onnxrt", dynamic=True)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(f(x, 1.5), model(x, 1.5))
        settle(5 * WAIT)
        torch.testing.assert_close(f(x, 1.5), model(x, 1.5))
    assert isinstance(last().attempts[0].timing, dict), last().attempts[0].timing


def test_graph_that_is_called_once_needs_no_engine(sandbox: Sandbox) -> None:
    """Nothing is built for it anywhere."""
    beside(torch.sin, FakeBackend())(torch.ones(2))
    settle()
    assert sandbox.inputs == []


def test_sandbox_gets_copies_of_the_second_calls_inputs(sandbox: Sandbox) -> None:
    """With numbers for sizes that are symbols; the program may write to its own."""
    sandbox.decides(0)
    f = beside(lambda x: x.sin(), FakeBackend(), dynamic=True)
    f(torch.ones(3))
    x = torch.zeros(5)
    f(x)
    settle()
    ((size, copy),) = sandbox.inputs
    assert size == 5
    assert torch.equal(copy, torch.zeros(5))
    assert copy.data_ptr() != x.data_ptr()
    assert torch.equal(f(torch.ones(4)), torch.ones(4).sin())
    assert last().chosen == "fake_honest"


def test_eager_goes_on_where_it_is_the_fastest(sandbox: Sandbox) -> None:
    """No engine is built here."""
    backend = FakeBackend()
    sandbox.decides(places=1)
    f = beside(torch.sin, backend)
    f(torch.ones(2))
    f(torch.ones(2))
    settle()
    assert torch.equal(f(torch.ones(2)), torch.ones(2).sin())
    assert (last().chosen, backend.compiles) == ("eager", 0)
    assert last().attempts[0].reason == "slower"


def test_engine_that_was_chosen_and_fails_gives_way_to_the_next(sandbox: Sandbox) -> None:
    """The next of the ranking; eager answers the call that failed."""
    sandbox.decides(1, 0)
    f = beside(torch.sin, FakeBackend(name="next"), FakeBackend("raises", at=2, name="fails"))
    x = torch.ones(2)
    for _ in range(2):
        f(x)
    settle()
    for _ in range(3):
        assert torch.equal(f(x), x.sin())
    assert (last().chosen, last().runtime.fallbacks) == ("next", 1)


def test_winner_that_is_refused_here_gives_way_to_the_next(sandbox: Sandbox) -> None:
    """At the same call."""
    sandbox.decides(0, 1)
    f = beside(torch.sin, FakeBackend("raises"), FakeBackend(name="next"))
    x = torch.ones(2)
    for _ in range(2):
        f(x)
    settle()
    assert torch.equal(f(x), x.sin())
    assert last().chosen == "next"
    assert [str(each.status) for each in last().attempts] == ["failed", "succeeded"]


def test_first_accepted_serves_where_no_sandbox_can_decide(sandbox: Sandbox) -> None:
    """The record says why."""
    sandbox.decision = Undecided("it cannot be sent")
    f = beside(torch.sin, FakeBackend("raises"), FakeBackend(name="next"))
    x = torch.ones(2)
    for _ in range(2):
        f(x)
    settle()
    assert torch.equal(f(x), x.sin())
    assert last().chosen == "next"
    assert last().attempts[1].timing == "no: it cannot be sent"


def test_engine_that_ended_a_sandbox_is_not_built_here(sandbox: Sandbox) -> None:
    """Also where the sandbox that went on without it has decided nothing."""
    crashed = Attempt("x", Status.CRASHED, Reason.CRASHED, "it ended a sandbox", 1.0)
    sandbox.decision = Undecided("there is no process left", {0: crashed})
    ended = FakeBackend()
    f = beside(torch.sin, ended, FakeBackend(name="next"))
    for _ in range(2):
        f(torch.ones(2))
    settle()
    f(torch.ones(2))
    assert (last().chosen, ended.compiles) == ("next", 0)
    assert last().attempts[0].message == "it ended a sandbox"
    assert last().attempts[0].reason == "crashed"


def test_candidates_behind_the_first_accepted_may_serve(sandbox: Sandbox) -> None:
    """The sandbox has not tried them, if it was to take the first; they are isolated as ever."""
    accepted = Attempt("x", Status.SUCCEEDED, None, "", 2.0)
    sandbox.decision = Decision((accepted,), (0, 1))
    select = {"by": "first", "background": True}
    f = beside(torch.sin, FakeBackend("raises"), FakeBackend(name="next"), select=select)
    x = torch.ones(2)
    for _ in range(2):
        f(x)
    settle()
    assert torch.equal(f(x), x.sin())
    assert [str(each.status) for each in last().attempts] == ["failed", "succeeded"]
    assert "built_apart" not in last().attempts[1].engine


def test_other_calls_do_not_wait_for_the_one_that_loads_the_winner(sandbox: Sandbox) -> None:
    """Eager answers them."""
    building, may_build = threading.Event(), threading.Event()

    def slow(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        building.set()
        assert may_build.wait(WAIT)
        return engines.honest(gm, example_inputs)

    sandbox.decides(0, places=1)
    f = beside(torch.sin, slow)
    x = torch.ones(2)
    for _ in range(2):
        f(x)
    settle()
    loads = threading.Thread(target=f, args=(x,))
    loads.start()
    assert building.wait(WAIT)
    assert torch.equal(f(x), x.sin())
    assert last().chosen == "eager"
    may_build.set()
    loads.join()
    assert last().chosen == "slow"


def test_interrupted_load_is_made_at_the_next_call(sandbox: Sandbox) -> None:
    """The decision is not lost."""
    interrupts = [KeyboardInterrupt()]

    def interrupted(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        if interrupts:
            raise interrupts.pop()
        return engines.honest(gm, example_inputs)

    sandbox.decides(0, places=1)
    f = beside(torch.sin, interrupted)
    x = torch.ones(2)
    for _ in range(2):
        f(x)
    settle()
    with pytest.raises(KeyboardInterrupt):
        f(x)
    assert torch.equal(f(x), x.sin())
    assert last().chosen == "interrupted"


def test_interrupted_copy_of_the_inputs_ends_no_selection(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It begins with a later call."""

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    sandbox.decides(0, places=1)
    f = beside(torch.sin, FakeBackend())
    f(torch.ones(2))
    with monkeypatch.context() as patch:
        patch.setattr(background, "begin", interrupted)
        with pytest.raises(KeyboardInterrupt):
            f(torch.ones(2))
    call(f)
    assert last().chosen == "fake_honest"


def test_verdict_is_kept_and_loaded_at_once_the_next_time(sandbox: Sandbox) -> None:
    """Then nothing is asked of a sandbox."""
    sandbox.decides(0, 1)
    x = torch.ones(2)
    for _ in range(2):
        torch.compiler.reset()
        f = beside(torch.sin, "aot_eager", "eager")
        f(x)
        f(x)
        settle()
        f(x)
        assert last().chosen == "aot_eager"
    assert len(sandbox.inputs) == 1
    assert len(Verdict.cache().entries()) == 1


def test_reset_ends_the_selection(sandbox: Sandbox) -> None:
    """Eager goes on."""
    sandbox.may_end.clear()
    f = beside(torch.sin, FakeBackend())
    f(torch.ones(2))
    f(torch.ones(2))
    assert sandbox.began.wait(WAIT)
    composer.reset()
    assert sandbox.unwanted.wait(WAIT)
    assert torch.equal(f(torch.ones(2)), torch.ones(2).sin())


def test_graph_that_is_dropped_ends_the_selection(sandbox: Sandbox) -> None:
    """Nobody would call the winner."""
    sandbox.may_end.clear()
    f = beside(torch.sin, FakeBackend())
    f(torch.ones(2))
    f(torch.ones(2))
    assert sandbox.began.wait(WAIT)
    del f
    torch.compiler.reset()
    assert sandbox.unwanted.wait(WAIT)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_child_goes_on_with_eager(sandbox: Sandbox) -> None:
    """The thread that waits for the sandbox does not exist there."""
    sandbox.decides(0)
    sandbox.may_end.clear()
    f = beside(torch.sin, FakeBackend())
    f(torch.ones(2))
    f(torch.ones(2))

    def child() -> None:
        assert session.current().background.settled(0.0)
        assert torch.equal(f(torch.ones(2)), torch.ones(2).sin())

    assert in_child(child) == 0
    sandbox.may_end.set()
    settle()
    f(torch.ones(2))
    assert last().chosen == "fake_honest"


def test_training_steps_change_engines_between_two_steps(sandbox: Sandbox) -> None:
    """Also between two of those whose gradients are added."""
    sandbox.decides(0, places=1)
    net, same = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    same.load_state_dict(net.state_dict())
    f = beside(net, "aot_eager")
    for number in range(4):
        x = torch.randn(4, 3)
        f(x).sum().backward()
        same(x).sum().backward()
        if number == 1:
            settle()
    assert last().training
    assert last().chosen == "aot_eager"
    torch.testing.assert_close(net.weight.grad, same.weight.grad)


def test_choice_is_compared_with_eager_when_it_is_loaded(sandbox: Sandbox) -> None:
    """As the policy asks, by the call's own inputs."""
    sandbox.decides(0, 1)
    f = beside(torch.sin, FakeBackend("wrong_value"), FakeBackend(name="next"), verify="compile")
    x = torch.ones(2)
    for _ in range(2):
        f(x)
    settle()
    assert torch.equal(f(x), x.sin())
    assert last().chosen == "next"
    assert last().attempts[0].status == "rejected"


def test_strict_builds_at_the_first_call(sandbox: Sandbox) -> None:
    """So an error reaches its caller."""
    select = {"by": "first", "background": True}
    f = beside(torch.sin, FakeBackend(), select=select, strict=True)
    f(torch.ones(2))
    assert sandbox.inputs == []
    assert last().chosen == "fake_honest"


class Quiet:
    """Stands for a lull: the load is gone, or not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.has_come = False
        monkeypatch.setattr(background.Lull, "has_come", lambda _: self.has_come)


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> Quiet:
    return Quiet(monkeypatch)


def provisional(
    sandbox: Sandbox, *chain: Any, ranking: tuple[int, ...] = (0, 1), **options: Any
) -> Any:
    """Compile with a selection in the background, which the sandbox makes beside a load."""
    sandbox.decides(*ranking, under_load=True)
    f = beside(torch.sin, *chain, **options)
    for _ in range(3):
        f(torch.ones(2))
        settle()
    return f


def call(f: Any, times: int = 3) -> None:
    """Call it, and wait for the background after each call."""
    for _ in range(times):
        assert torch.equal(f(torch.ones(2)), torch.ones(2).sin())
        settle()


def test_choice_beside_a_load_is_made_anew_when_the_load_is_gone(
    sandbox: Sandbox, quiet: Quiet
) -> None:
    """The engine serves until then. The change is recorded, and the new verdict is learnt."""
    f = provisional(sandbox, "aot_eager", "eager")
    call(f)
    assert (last().chosen, len(sandbox.inputs)) == ("aot_eager", 1)
    assert [e.facts["candidates"][0]["timing"]["under_load"] for e in Verdict.cache().entries()]
    sandbox.decides(1, 0)
    quiet.has_come = True
    call(f)
    assert (last().chosen, len(sandbox.inputs)) == ("eager", 2)
    assert [str(each.status) for each in last().attempts] == ["not_chosen", "succeeded"]
    (entry,) = Verdict.cache().entries()
    assert entry.facts["chosen"] == "eager"
    assert "under_load" not in entry.facts["candidates"][0]["timing"]
    call(f)
    assert len(sandbox.inputs) == 2


def test_engine_that_wins_again_is_not_built_again(sandbox: Sandbox, quiet: Quiet) -> None:
    """Only the record has other times."""
    first, second = FakeBackend(name="first"), FakeBackend(name="second")
    f = provisional(sandbox, first, second)
    assert last().attempts[0].timing["under_load"]
    sandbox.decides(0, 1)
    quiet.has_come = True
    call(f)
    assert (last().chosen, first.compiles, second.compiles) == ("first", 1, 0)
    assert last().attempts[0].timing == TIMED
    assert last().attempts[0].engine["built_apart"] == {"seconds": 2.0}
    assert len(sandbox.inputs) == 2


def test_eager_takes_over_where_it_is_found_to_be_the_fastest(
    sandbox: Sandbox, quiet: Quiet
) -> None:
    """For good: that choice is not provisional."""
    f = provisional(sandbox, FakeBackend(), FakeBackend(name="second"))
    quiet.has_come = True
    sandbox.decides()
    call(f)
    assert last().chosen == "eager"
    sandbox.decides(1, 0)
    call(f)
    assert last().chosen == "eager"


def test_engine_takes_over_from_eager(sandbox: Sandbox, quiet: Quiet) -> None:
    """If eager was the provisional choice."""
    f = provisional(sandbox, FakeBackend(), FakeBackend(name="second"), ranking=())
    assert last().chosen == "eager"
    quiet.has_come = True
    sandbox.decides(1, 0)
    call(f)
    assert last().chosen == "second"


def test_provisional_choice_stays_where_it_cannot_be_made_anew(
    sandbox: Sandbox, quiet: Quiet
) -> None:
    """It was measured, after all; and the next lull is waited for."""
    f = provisional(sandbox, FakeBackend(), FakeBackend(name="second"))
    quiet.has_come = True
    sandbox.decision = Undecided("there is too little memory")
    call(f)
    assert sandbox.decision is not None
    asked = len(sandbox.inputs)
    sandbox.decides(1, 0, lasts=False)
    call(f)
    assert len(sandbox.inputs) > asked > 1
    assert last().chosen == "fake_honest"
    sandbox.decides(1, 0, under_load=True)
    call(f)
    assert last().chosen == "fake_honest"
    sandbox.decides(1, 0)
    call(f)
    assert last().chosen == "second"


def test_engine_that_fails_meanwhile_does_not_come_back(sandbox: Sandbox, quiet: Quiet) -> None:
    """The decision that is made anew leaves out who is in quarantine."""
    f = provisional(sandbox, FakeBackend("raises", at=3), FakeBackend(name="second"), verify="off")
    call(f)
    assert last().chosen == "second"
    quiet.has_come = True
    sandbox.decides(0, 1)
    call(f)
    assert (last().chosen, last().runtime.fallbacks) == ("second", 1)


@pytest.mark.parametrize(("options", "asked"), [({}, 1), ({"isolate": False}, 0)])
def test_verdict_of_an_earlier_process_serves_and_is_made_anew(
    options: dict[str, Any],
    asked: int,
    sandbox: Sandbox,
    quiet: Quiet,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """But not where the policy wants no child process."""
    f = provisional(sandbox, "aot_eager", "eager", **options)
    sandbox.inputs.clear()
    monkeypatch.setattr(disk, "_PROCESS", "another")
    composer.reset()
    torch.compiler.reset()
    quiet.has_come = True
    sandbox.decides(1, 0)
    f = beside(torch.sin, "aot_eager", "eager", **options)
    f(torch.ones(2))
    assert last().chosen == "aot_eager"
    call(f)
    assert len(sandbox.inputs) == asked
    assert last().chosen == ("eager" if asked else "aot_eager")


def test_lull_is_some_seconds_without_a_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks after more and more calls until those take as long, and waits for CPU time."""
    now, is_loaded, cpu = 0.0, True, 2000.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    monkeypatch.setattr(time, "process_time", lambda: cpu)
    monkeypatch.setattr(hardware.Waits, "beside_load", lambda _: is_loaded)
    monkeypatch.setattr(session.current().background, "allowance", Allowance())
    lull = background.Lull()

    def looks(seconds: float) -> bool:
        nonlocal now
        now += seconds
        return lull.has_come()

    assert not looks(1.0)
    assert not looks(2.0)
    assert lull.calls == 4
    assert not looks(8.0)  # there was a load
    is_loaded = False
    assert not looks(9.0)
    assert lull.calls == 8
    assert looks(2.0)
    assert not looks(11.0)  # the next takes twice as long
    assert looks(10.0)
    assert not looks(100.0)  # there is no CPU time left
    cpu = 3000.0
    assert looks(100.0)


def test_measuring_anew_takes_a_hundredth_of_the_cpu_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what the process has used. What one has taken is expected of the next."""
    cpu = 999.0
    monkeypatch.setattr(time, "process_time", lambda: cpu)
    allowance = Allowance()
    assert not allowance.take()
    cpu = 1001.0
    assert allowance.take()
    allowance.settle(30.0)
    cpu = 5999.0
    assert not allowance.take()
    cpu = 6001.0
    assert allowance.take()


def test_measurements_under_way_have_time_set_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    """As much as each of them was expected to take; also one of which the time is never known."""
    monkeypatch.setattr(time, "process_time", lambda: 10_000.0)  # 100 for measurements
    allowance = Allowance()
    assert allowance.take()
    assert allowance.take()
    allowance.settle(30.0)
    assert allowance.take()  # 30, and what two are expected to take
    assert not allowance.take()
    allowance.settle(30.0)
    allowance.settle(30.0)
    assert not allowance.take()


def test_measurement_that_ends_its_sandbox_is_not_free(
    sandbox: Sandbox, quiet: Quiet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody knows what it took, so what was expected counts."""
    monkeypatch.setattr(time, "process_time", lambda: 1500.0)
    monkeypatch.setattr(session.current().background, "allowance", Allowance())
    f = provisional(sandbox, FakeBackend(), FakeBackend(name="second"))
    quiet.has_come = True
    assert session.current().background.allowance.take()
    sandbox.decides(0, 1, lasts=False)
    call(f)
    assert not session.current().background.allowance.take()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks")
def test_forked_child_has_an_allowance_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its CPU time begins with the fork."""
    monkeypatch.setattr(time, "process_time", lambda: 1001.0)
    worker = Worker()
    assert worker.allowance.take()
    assert not worker.allowance.take()

    def takes() -> None:
        assert worker.allowance.take()

    assert in_child(takes) == 0


def test_record_says_what_is_under_way(sandbox: Sandbox, caplog: pytest.LogCaptureFixture) -> None:
    """While a sandbox builds, the log too; nothing when it has decided."""
    caplog.set_level(logging.INFO, "composer")
    sandbox.decides(1, 0)
    sandbox.may_end.clear()
    f = beside(torch.sin, FakeBackend(name="slow"), FakeBackend(name="quick"))
    f(torch.ones(3))
    assert last().runtime.under_way == ""
    f(torch.ones(3))
    assert sandbox.began.wait(WAIT)
    step = "slow, 1 of 2, in a child process"
    assert last().to_dict()["runtime"]["under_way"] == step
    assert f"\n  in the background: {step}\n" in str(composer.report())
    sandbox.may_end.set()
    settle()
    assert last().runtime.under_way == ""
    told = [each.getMessage() for each in caplog.records]
    begin = f"in the background, graph {last().number} ({last().model}): "
    steps = [each.removeprefix(begin) for each in told if each.startswith(begin)]
    assert steps == ["waiting for a child process", step]


def test_last_record_says_what_the_end_of_the_process_interrupts(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would look as if nothing had been begun."""
    sandbox.may_end.clear()
    f = beside(torch.sin, FakeBackend())
    for _ in range(2):
        f(torch.ones(3))
    assert sandbox.began.wait(WAIT)
    monkeypatch.setattr(session.current().background, "is_ending", True)
    settle()
    assert sandbox.unwanted.is_set()
    assert last().runtime.under_way == "slow, 1 of 2, in a child process"


@SLOW
def test_sandbox_chooses_an_engine_while_the_program_calls() -> None:
    """A real one, with an engine that ends it; torch's own flags stay what they are."""
    x = torch.randn(3)
    options = {"chain": [FakeBackend("segfaults"), engines.honest], "select": FASTEST}
    f = torch.compile(torch.sin, backend="composer", options=options)
    seen = set()
    f(x)
    f(x)
    told = set()
    while not session.current().background.settled(0.001):
        told |= set(str(composer.report()).splitlines())
        seen.add(
            (torch.compiler.is_compiling(), torch.get_default_dtype(), torch.is_grad_enabled())
        )
        assert torch.equal(f(x), x.sin())
    assert seen == {(False, torch.float32, True)}
    step = "honest, 2 of 2, in a child process"
    assert any(each.startswith("now: ") and f"{step}, for " in each for each in told)
    assert f"  in the background: {step}" in told
    assert torch.equal(f(x), x.sin())
    assert last().attempts[0].reason == "crashed"
    assert last().attempts[1].timing["ms"] > 0


@SLOW
def test_sandbox_takes_the_first_that_is_accepted() -> None:
    """With ``by = "first"``: nothing is measured."""
    select = {"by": "first", "background": True}
    options = {"chain": [FakeBackend("raises"), engines.honest], "select": select}
    f = torch.compile(torch.sin, backend="composer", options=options)
    x = torch.ones(3)
    for _ in range(2):
        f(x)
    settle()
    assert torch.equal(f(x), x.sin())
    assert last().chosen == "honest"
    assert last().attempts[1].timing is None


PROGRAM = """
import os, sys, torch
sys.path[:0] = sys.argv[2:]
from composer.testing import FakeBackend
options = {"chain": [FakeBackend("hangs")], "select": {"by": "fastest", "background": True}}
f = torch.compile(torch.sin, backend="composer", options=options)
for _ in range(3):
    f(torch.ones(2))
import composer.session as session
import time
while not session.current().progress.now():
    time.sleep(0.05)
print("building", flush=True)
{ends}
"""
ENDS = {
    "returns": "",
    "exits": "sys.exit(0)",
    "is ended": "os.kill(os.getpid(), 15)",
    "is killed": "os.kill(os.getpid(), 9)",
    "is interrupted": "os.kill(os.getpid(), 2)",
}


@SLOW
@pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")
@pytest.mark.parametrize("how", ENDS)
def test_no_process_is_left_behind(how: str) -> None:
    """However the program ends while a candidate hangs in a sandbox; and it ends at once."""
    mark = f"composer-test-{os.getpid()}-{how.replace(' ', '-')}"
    environment = os.environ | {"COMPOSER_TEST_MARK": mark}
    code = PROGRAM.replace("{ends}", ENDS[how])
    done = subprocess.run(
        [sys.executable, "-c", code, "-", *sys.path],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "building" in done.stdout, done.stderr
    until = time.monotonic() + WAIT
    while _marked(mark) and time.monotonic() < until:
        time.sleep(0.1)
    assert _marked(mark) == []


def _marked(mark: str) -> list[str]:
    """The processes with a mark in their environment."""
    found = []
    for each in Path("/proc").glob("*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if mark.encode() in each.read_bytes():
                found.append(each.parent.name)
    return found
