"""The engine slot: every state and event has a row, and no walk through them breaks a promise."""

from __future__ import annotations

import gc
import itertools
import os
import random
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from common import ROOT, in_child
from slots import EAGER, FakeChain

from composer.runtime.slot import (
    TABLE,
    Answer,
    Built,
    Compiled,
    Engine,
    Event,
    Row,
    Slot,
    State,
    Then,
)
from composer.runtime.special_calls import CallKind, Schedule

FAILURES = (Event.RAISED, Event.WROTE, Event.WRONG, Event.LACKED, Event.BACKWARD)


class Program:
    """A slot and the calls of it, as :mod:`composer.runtime.calls` makes them, without torch."""

    def __init__(self, chain: FakeChain, first: int | None = 0) -> None:
        self.chain = chain
        self.ticks = itertools.count()
        self.runtime: Any = SimpleNamespace(calls=0, reads=0)
        self.serving: list[Any] = []
        built = Built(None if first is None else chain.engine(first), order=(0, 1, 2, 3))
        chain.record.append(EAGER if first is None else first)
        schedule = Schedule(None, begins=False)
        self.slot = Slot(built, self, chain, self.runtime, schedule)
        self.slot.called_by = lambda: self

    def install(self, engine: Engine) -> Compiled:
        with self.chain.alone():
            time.sleep(0)
        return engine.compiled

    def resume(self, *args: Any) -> Any:
        return self.slot.advance(args)(*args)

    def call(self, fault: Event | None = None) -> list[Any]:
        """Make a call; whoever answered it, or the error of an engine that had written."""
        slot, number = self.slot, next(self.ticks)
        self.runtime.calls = number + 1
        run = slot.run
        if number >= slot.due and slot.kind_of(number, run) is CallKind.RETRY:
            run = slot.retry(())
        if run is slot.resuming:
            run = slot.advance(())
        if fault is None or not slot.follows(run):
            return [run()]
        answers = self.answered(fault, run)
        time.sleep(0)  # another thread may give the engine up meanwhile
        slot.fail(fault, run, RuntimeError(run()))
        self.chain.publish()
        return answers

    def answered(self, fault: Event, run: Compiled) -> list[Any]:
        match TABLE[fault].answer:
            case Answer.EAGER | Answer.AGAIN:
                return [self.chain.fallback()]
            case Answer.NOBODY:
                return ["error"]
            case _:
                return [run()]

    def select(self, place: int, *, keeps: bool) -> bool:
        """Background selection ends, and has found another engine; whether that is taken."""
        slot, first = self.slot, self.slot.run
        with slot.lock:
            if slot.state is not State.SERVING or not slot.is_wanted(first):
                return False
            assert slot.engine is not None
            was = slot.engine.place
            self.chain.replaced = was
            self.chain.record.append(place)
            order = (place, was, *(p for p in range(4) if p not in (place, was)))
            slot.take_over(Built(self.chain.engine(place), order), keeps=keeps)
            return True


PAIRS = {(state, event): getattr(TABLE[event], state) for state in State for event in Event}


def test_table_has_a_row_for_every_event_and_a_cell_for_every_state() -> None:
    """Those that cannot happen included."""
    assert [*TABLE] == [*Event]
    assert Row._fields == ("answer", *State)


@pytest.mark.parametrize(("state", "event"), [p for p, then in PAIRS.items() if then is Then.NEVER])
def test_event_that_cannot_happen_is_an_error_that_names_both(state: State, event: Event) -> None:
    """It would be a mistake in composer, and is not passed over."""
    slot = Program(FakeChain()).slot
    slot.state = state
    with pytest.raises(RuntimeError, match=f"an engine slot that is {state} cannot .*{event}"):
        slot._happen(event)
    assert slot.state is state


@pytest.mark.parametrize(("state", "event"), [p for p, t in PAIRS.items() if t is not Then.NEVER])
def test_slot_follows_the_table(state: State, event: Event) -> None:
    """The next state, and who serves then."""
    program = Program(FakeChain())
    slot, replaced = program.slot, program.chain.engine(1)
    slot.state, slot._previous = state, replaced if state is State.PROBATION else None
    slot.run = {State.EAGER: program.chain.fallback, State.QUARANTINED: slot.resuming}.get(
        state, slot.run
    )
    before, new = slot.run, program.chain.engine(2)
    then = slot._happen(event, new)
    serves = dict.fromkeys((Then.NEW, Then.PROBATION), new.compiled)
    serves |= {Then.PREVIOUS: replaced.compiled, Then.EAGER: program.chain.fallback}
    assert then is PAIRS[state, event]
    assert slot.state is then.value[0]
    assert slot.run is serves.get(then, before)
    assert (slot._previous is not None) is (slot.state is State.PROBATION)


def test_engine_that_failed_is_released_before_the_next_is_built() -> None:
    """The next may need its memory."""
    program = Program(FakeChain(refuses=0))
    program.call(Event.RAISED)
    gc.collect()
    assert program.chain.made[0]() is None
    assert program.slot.state is State.QUARANTINED
    assert program.call() == [1]


def test_engine_that_no_longer_serves_changes_nothing() -> None:
    """Its call began before another thread had given it up."""
    program = Program(FakeChain(refuses=0))
    late = program.slot.run
    program.call(Event.RAISED)
    record = list(program.chain.record)
    program.slot.fail(Event.RAISED, late, RuntimeError("late"))
    assert program.chain.record == record
    assert program.slot.state is State.QUARANTINED


def test_graph_that_was_dropped_is_not_wanted() -> None:
    """The engine that was kept for the first calls goes as well."""
    program = Program(FakeChain(refuses=0))
    assert program.select(2, keeps=True)
    slot = program.slot
    assert slot.is_wanted(slot.run)
    slot.called_by = lambda: None
    assert not slot.is_wanted(slot.run)
    assert slot.state is State.FREED
    gc.collect()
    assert [made() is None for made in program.chain.made] == [True, False]
    slot.fail(Event.BACKWARD, slot.run, RuntimeError(2), "its backward raised")
    assert (slot.state, program.chain.chosen) == (State.FREED, EAGER)


def walk(program: Program, seed: int, steps: int) -> None:
    """One thread's calls, each with its fault or none, and what else happens between them."""
    chance, chain = random.Random(seed), program.chain
    for _ in range(steps):
        if chance.random() < 0.1:
            program.select(chance.randrange(4), keeps=chance.random() < 0.7)
        fault = chance.choice(FAILURES) if chance.random() < 0.3 else None
        answers = program.call(fault)
        if len(answers) != 1:
            chain.faults.append(f"{fault}: answered by {answers}")
        with program.slot.lock:
            engine = program.slot.engine
            if chain.chosen != (engine.place if engine else EAGER):
                chain.faults.append(f"{engine} serves, and the record says {chain.chosen}")


def assert_whole(program: Program) -> None:
    """What holds between two calls, whatever has happened."""
    slot, chain = program.slot, program.chain
    gc.collect()
    place = slot.engine.place if slot.engine else EAGER
    assert chain.faults == []
    assert chain.chosen == place
    serving = slot.state in (State.SERVING, State.PROBATION)
    assert (slot.engine is not None) is serving
    assert slot.run is (
        slot.engine.compiled
        if slot.engine
        else chain.fallback
        if slot.state is State.EAGER
        else slot.resuming
    )
    alive = [made() for made in chain.made if made() is not None]
    kept = [each.compiled for each in (slot.engine, slot._previous) if each is not None]
    assert sorted(map(id, alive)) == sorted(map(id, kept))
    assert len(kept) == serving + (slot.state is State.PROBATION)


@pytest.mark.parametrize("seed", range(20))
def test_no_walk_of_several_threads_breaks_a_promise(seed: int) -> None:
    """One engine is installed at a time, the record names it, and what it replaced is let go."""
    program = Program(FakeChain(seed))
    threads = [
        threading.Thread(target=walk, args=(program, 100 * seed + number, 60))
        for number in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_whole(program)
    program.call()
    assert_whole(program)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("seed", range(3))
def test_child_forked_during_a_walk_goes_on_by_itself(seed: int) -> None:
    """Whatever the other threads of its parent were doing; the parent goes on as well."""
    program, done = Program(FakeChain(seed)), threading.Event()

    def work(number: int) -> None:
        while not done.is_set():
            walk(program, 100 * seed + number, 5)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()

    def child() -> None:
        program.chain.free_locks()
        program.call()
        assert len(program.call()) == 1

    code = in_child(child)
    done.set()
    for thread in threads:
        thread.join()
    assert code == 0
    assert_whole(program)


@pytest.mark.slow
def test_slot_needs_no_torch(fresh_python: Any) -> None:
    """Nor does anything that it imports."""
    done = fresh_python("import composer.runtime.slot, sys; print('torch' in sys.modules)")
    assert done.stdout == "False\n", done.stderr


def test_docs_show_the_table() -> None:
    """Cell by cell, as the code has it."""
    page = (ROOT / "docs" / "explanation" / "reading-the-code.md").read_text()
    for line in table_lines():
        assert line in page


def table_lines() -> list[str]:
    """The table of the slot in Markdown: an event a line, and a column for each state."""
    head = ["event", "who answers this call", *State]
    rows = [[event, row.answer, *map(cell, row[1:])] for event, row in TABLE.items()]
    return [f"| {' | '.join(row)} |" for row in (head, *rows)]


def cell(then: Then) -> str:
    """The state that follows, and who serves the next call."""
    state, serves = then.value
    return f"{state}: {serves}" if state else serves
