"""A served graph follows its table, and no walk through its states breaks a promise."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import random
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from common import ROOT, in_child, in_threads
from successors import EAGER, FakeSuccessors

from composer.records import Runtime
from composer.runtime.calls import around, watch
from composer.runtime.served import Built, Compiled, ServedGraph
from composer.runtime.table import TABLE, Answer, Event, Next, State
from composer.runtime.versions import Versions

FAILURES = (Event.RAISED, Event.WRONG, Event.LACKED, Event.BACKWARD, Event.BACKWARD_LOST)


class Program:
    """A served graph, and the calls of it, without a compile."""

    def __init__(self, successors: FakeSuccessors, first: int | None = 0) -> None:
        self.successors = successors
        self.runtime = Runtime()
        built = Built(None if first is None else successors.engine(first), order=(0, 1, 2, 3))
        successors.record.append(EAGER if first is None else first)
        versions: Any = Versions((), (), blind=False)
        graph: Any = successors
        self.served = ServedGraph(built, graph, self.runtime, versions)
        self.called = watch(around(self.served, self.runtime), self.served.free)

    def call(self, fault: Event | None = None) -> list[Any]:
        """Make a call, which then meets a fault; who answered it."""
        run = self.served.run
        answers = list(self.called())
        if fault is not None and run not in (self.served.resuming, self.successors.fallback):
            time.sleep(0)  # another thread may give the engine up meanwhile
            self.served.fail(fault, run, RuntimeError(answers[0]))
            self.successors.publish()
        return answers

    def decide(self, place: int | None) -> None:
        """Have the background decide for the candidate at a place, or for eager."""
        decision: Any = SimpleNamespace(place=place)
        self.served.decided(decision)


@contextlib.contextmanager
def holding(lock: Any) -> Iterator[None]:
    """Have another thread hold a lock."""
    held, ends = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            ends.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(30)
    try:
        yield
    finally:
        ends.set()
        thread.join()


POSSIBLE = list(TABLE)
IMPOSSIBLE = [each for each in itertools.product(Event, State) if each not in TABLE]


@pytest.mark.parametrize(("event", "state"), IMPOSSIBLE)
def test_event_that_cannot_happen_is_an_error_that_names_both(event: Event, state: State) -> None:
    """It would be a mistake in composer, and is not passed over."""
    served = Program(FakeSuccessors()).served
    served.state = state
    with pytest.raises(RuntimeError, match=f"a served graph that is {state} cannot .*{event}"):
        served._happen(event)
    assert served.state is state


@pytest.mark.parametrize(("event", "state"), POSSIBLE)
def test_graph_follows_the_table(event: Event, state: State) -> None:
    """The next state, and who serves then."""
    program = Program(FakeSuccessors())
    served = program.served
    served.state = state
    before, new = served.run, program.successors.engine(2)
    served._happen(event, None if event is Event.EXHAUSTED else new)
    serves = {Next.NEW: new.compiled, Next.EAGER: program.successors.fallback}
    row = TABLE[event, state]
    assert served.state is row.to
    assert served.run is serves.get(row.serves, before)


def test_every_answer_and_every_state_is_in_the_table() -> None:
    """None is there for its own sake."""
    assert {row.answer for row in TABLE.values()} == {*Answer, None}
    assert {row.to for row in TABLE.values()} == {*State}
    assert {row.serves for row in TABLE.values()} == {*Next}


def test_decision_is_followed_at_the_next_call() -> None:
    """Eager answers until then."""
    program = Program(FakeSuccessors(), first=None)
    assert program.call() == [EAGER]
    program.decide(2)
    assert program.served.state is State.EAGER
    assert program.call() == [2]
    assert program.served.state is State.SERVING


def test_decision_for_eager_changes_nothing() -> None:
    """Eager was the fastest."""
    program = Program(FakeSuccessors(), first=None)
    program.decide(None)
    assert program.call() == [EAGER]
    assert program.served.state is State.EAGER


def test_choice_that_cannot_be_followed_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error reaches the call, and no later call waits for the choice."""
    program = Program(FakeSuccessors(), first=None)
    program.served.is_chosen = False
    refused = Mock(side_effect=ValueError("a pass failed"))
    monkeypatch.setattr(program.successors, "follow", refused)
    program.decide(2)
    with pytest.raises(ValueError, match="a pass failed"):
        program.call()
    assert program.served.is_chosen
    assert program.call() == [EAGER]


def test_failure_that_is_interrupted_is_followed_by_the_next_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The record of the failure takes time; a signal may end it."""
    program = Program(FakeSuccessors(refuses=0))
    with monkeypatch.context() as interrupted:
        interrupted.setattr(program.successors, "failed", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            program.call(Event.RAISED)
    assert program.call() == [1]
    assert program.served.state is State.SERVING


def test_interrupted_wait_for_another_compile_leaves_the_choice_to_the_next_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Dynamo compiles in one thread at a time."""
    program = Program(FakeSuccessors(), first=None)
    program.decide(2)
    with monkeypatch.context() as interrupted:
        interrupted.setattr(program.successors, "compiling", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            program.call()
    assert program.call() == [2]


def test_interrupted_wait_leaves_the_retry_to_the_next_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The quarantine of the first engine is over."""
    program = Program(FakeSuccessors(refuses=0, retry_after=2))
    program.call(Event.RAISED)
    assert [program.call() for _ in range(2)] == [[1], [1]]
    with monkeypatch.context() as interrupted:
        interrupted.setattr(program.successors, "compiling", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            program.call()
    assert program.call() == [0]


def test_call_of_another_thread_does_not_wait_for_a_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is due for something else, such as a comparison."""
    program = Program(FakeSuccessors(), first=None)
    program.decide(2)
    began, goes_on = threading.Event(), threading.Event()
    follow = program.successors.follow

    def slow(*args: Any) -> Any:
        began.set()
        goes_on.wait(30)
        return follow(*args)

    monkeypatch.setattr(program.successors, "follow", slow)
    building = threading.Thread(target=program.call)
    building.start()
    assert began.wait(30)
    program.served.due = 0
    other = threading.Thread(target=program.call)
    other.start()
    other.join(30)
    assert building.is_alive()
    assert not other.is_alive()
    goes_on.set()
    building.join()
    assert program.call() == [2]


def test_interrupted_call_does_not_wait_for_the_build_of_another_thread() -> None:
    """Ctrl-C is to end the program now."""
    program = Program(FakeSuccessors(refuses=0))
    with holding(program.served.lock):
        program.served._interrupted()
    assert program.call() == [0]


def test_call_of_an_engine_that_was_given_up_meanwhile_is_eagers() -> None:
    """If calls are compared, another thread may just have found it to be wrong."""
    program = Program(FakeSuccessors(refuses=0))
    wrong = program.served.run
    sampler: Any = SimpleNamespace(fallback=program.successors.fallback)
    program.served._sampler = sampler
    program.served.fail(Event.WRONG, wrong, RuntimeError(0))
    assert program.served._compared(wrong) is program.successors.fallback


def test_decision_is_followed_although_the_engine_fails_before() -> None:
    """Another thread may meet the failure while the call that follows it begins."""
    program = Program(FakeSuccessors(refuses=0))
    program.decide(2)
    serving = program.served.run
    _, follows = program.served.special(program.runtime.tick(), serving)
    program.served.fail(Event.RAISED, serving, RuntimeError(0))
    assert follows() == (2,)
    assert program.call() == [2]


def test_engine_that_was_chosen_and_fails_gives_way_to_the_next() -> None:
    """In the order of the decision."""
    program = Program(FakeSuccessors(refuses=0), first=None)
    program.decide(2)
    assert program.call(Event.RAISED) == [2]
    assert program.served.state is State.SERVING  # the fault met the call that loaded it
    program.call(Event.RAISED)
    assert program.call() == [0]


def test_engine_that_failed_is_released_before_the_next_is_built() -> None:
    """The next may need its memory."""
    program = Program(FakeSuccessors(refuses=0))
    program.call(Event.RAISED)
    gc.collect()
    assert program.successors.made[0]() is None
    assert program.served.state is State.QUARANTINED
    assert program.call() == [1]


def test_engine_that_no_longer_serves_changes_nothing() -> None:
    """Its call began before another thread had given it up."""
    program = Program(FakeSuccessors(refuses=0))
    late = program.served.run
    program.call(Event.RAISED)
    record = list(program.successors.record)
    program.served.fail(Event.RAISED, late, RuntimeError("late"))
    assert program.successors.record == record
    assert program.served.state is State.QUARANTINED


def test_graph_that_was_dropped_is_freed() -> None:
    """A backward of it may still fail; nobody serves the next call, since there is none."""
    program = Program(FakeSuccessors(refuses=0))
    served, run = program.served, program.served.run
    del program.called
    gc.collect()
    assert served.state is State.FREED
    served.fail(Event.BACKWARD, run, RuntimeError(0), "its backward raised")
    assert (served.state, program.successors.chosen) == (State.FREED, EAGER)


@pytest.mark.slow
def test_end_of_a_process_says_nothing_of_its_graphs(fresh_python: Any) -> None:
    """The graphs are dropped when Python's modules are gone already."""
    compiles = "f = torch.compile(torch.sin, backend='composer', options={'chain': ['aot_eager']})"
    done = fresh_python(f"import torch; {compiles}; f(torch.ones(2))")
    assert (done.returncode, done.stderr) == (0, "")


def walk(program: Program, seed: int, steps: int) -> None:
    """One thread's calls, each with its fault or none, and what else happens between them."""
    chance, successors = random.Random(seed), program.successors
    for _ in range(steps):
        with program.served.lock:
            if chance.random() < 0.1 and program.served.state is State.EAGER:
                program.decide(chance.choice([None, 0, 1, 2, 3]))
        fault = chance.choice(FAILURES) if chance.random() < 0.3 else None
        answers = program.call(fault)
        if len(answers) != 1:
            successors.faults.append(f"{fault}: answered by {answers}")
        with program.served.lock:
            engine = program.served.engine
            if successors.chosen != (engine.place if engine else EAGER):
                successors.faults.append(f"{engine} serves, not {successors.chosen}")


def assert_whole(program: Program) -> None:
    """What holds between two calls, whatever has happened."""
    served, successors = program.served, program.successors
    gc.collect()
    place = served.engine.place if served.engine else EAGER
    assert successors.faults == []
    assert successors.chosen == place
    assert (served.engine is not None) is (served.state is State.SERVING)
    serving: Compiled = served.engine.compiled if served.engine else successors.fallback
    assert served.run is (served.resuming if served.state is State.QUARANTINED else serving)
    alive = [made() for made in successors.made if made() is not None]
    kept = [served.engine.compiled] if served.engine else []
    assert sorted(map(id, alive)) == sorted(map(id, kept))


@pytest.mark.parametrize("seed", range(20))
def test_no_walk_of_several_threads_breaks_a_promise(seed: int) -> None:
    """One engine is installed at a time, the record names it, and what it replaced is let go."""
    program = Program(FakeSuccessors(seed))
    in_threads(lambda number: walk(program, 100 * seed + number, 60), range(4))
    assert_whole(program)
    program.call()
    assert_whole(program)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("seed", range(3))
def test_child_forked_during_a_walk_goes_on_by_itself(seed: int) -> None:
    """Whatever the other threads of its parent were doing; the parent goes on as well."""
    program, done = Program(FakeSuccessors(seed)), threading.Event()

    def work(number: int) -> None:
        while not done.is_set():
            walk(program, 100 * seed + number, 5)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()

    def child() -> None:
        program.successors.free_locks()
        program.call()
        assert len(program.call()) == 1

    code = in_child(child)
    done.set()
    for thread in threads:
        thread.join()
    assert code == 0
    assert_whole(program)


def test_docs_show_the_table() -> None:
    """Cell by cell, as the code has it."""
    page = (ROOT / "docs" / "explanation" / "reading-the-code.md").read_text()
    for line in table_lines():
        assert line in page


def table_lines() -> list[str]:
    """The table in Markdown: a transition a line."""
    head = ["event", "state", "who answers this call", "next state", "who serves the next call"]
    rows = [
        [event, state, row.answer or "", row.to, row.serves]
        for (event, state), row in TABLE.items()
    ]
    return [f"| {' | '.join(row)} |" for row in (head, *rows)]
