"""What one thread does beside the calls of a graph, and those calls, never meet."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from composer.system import barrier as barriers
from composer.system.barrier import Barrier

WAIT = 30.0


def started(function: Callable[..., Any], *args: Any) -> threading.Thread:
    thread = threading.Thread(target=function, args=args)
    thread.start()
    return thread


def offered(barrier: Barrier) -> None:
    """Wait until something is."""
    with barrier._changed:
        assert barrier._changed.wait_for(lambda: barrier._offer is not None, WAIT)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever offers something waits for a call to do it."""
    monkeypatch.setattr(barriers, "_PATIENCE", WAIT)


def announcing(barrier: Barrier, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set once something is offered."""
    here = threading.Event()
    wait_for = barrier._changed.wait_for

    def told(predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        if barrier._offer is not None:
            here.set()
        return wait_for(predicate, timeout)

    monkeypatch.setattr(barrier._changed, "wait_for", told)
    return here


@pytest.mark.usefixtures("patient")
def test_next_call_does_what_is_offered_before_it_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the thread that calls."""
    barrier, order, results = Barrier(), [], []
    here = announcing(barrier, monkeypatch)

    def work() -> float:
        order.append(("work", threading.get_ident()))
        return 2.5

    thread = started(lambda: results.append(barrier.perform(work)))
    assert here.wait(WAIT)
    mine = threading.get_ident()
    assert barrier.admit(lambda x: order.append(("call", mine)) or x + 1, 1) == 2
    thread.join(WAIT)
    assert (order, results) == ([("work", mine), ("call", mine)], [2.5])


def test_work_that_no_call_does_is_done_by_the_one_who_offers_it() -> None:
    """A call that comes meanwhile waits for its end."""
    barrier, order = Barrier(), []
    begun, may_end = threading.Event(), threading.Event()

    def work() -> float:
        begun.set()
        assert may_end.wait(WAIT)
        order.append("work")
        return 0.0

    offering = started(barrier.perform, work)
    assert begun.wait(WAIT)
    calling = started(barrier.admit, lambda: order.append("call"))
    may_end.set()
    for each in (offering, calling):
        each.join(WAIT)
    assert order == ["work", "call"]


def test_work_waits_for_calls_under_way() -> None:
    """And the seconds of it are told."""
    barrier, order = Barrier(), []
    inside, may_end = threading.Event(), threading.Event()

    def serve() -> None:
        inside.set()
        assert may_end.wait(WAIT)
        order.append("call")

    calling = started(barrier.admit, serve)
    assert inside.wait(WAIT)
    offering = started(barrier.perform, lambda: order.append("work") or 0.0)
    with barrier._changed:
        assert barrier._changed.wait_for(
            lambda: barrier._offer is not None and barrier._offer.begun, WAIT
        )
    may_end.set()
    for each in (offering, calling):
        each.join(WAIT)
    assert order == ["call", "work"]
    assert barrier.waited > 0


@pytest.mark.usefixtures("patient")
def test_error_of_the_work_is_for_the_one_who_offered_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call that did it is answered."""
    barrier, seen = Barrier(), []
    here = announcing(barrier, monkeypatch)

    def work() -> float:
        raise ValueError("of the work")

    def offer() -> None:
        with pytest.raises(ValueError, match="of the work") as raised:
            barrier.perform(work)
        seen.append(raised.value)

    thread = started(offer)
    assert here.wait(WAIT)
    assert barrier.admit(lambda: 7) == 7
    thread.join(WAIT)
    assert len(seen) == 1


@pytest.mark.usefixtures("patient")
def test_call_interrupted_before_it_does_the_work_ends_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A signal may come at any line; nobody waits for what will not be done."""
    barrier, seen = Barrier(), []
    here = announcing(barrier, monkeypatch)

    def offer() -> None:
        try:
            barrier.perform(lambda: 1.0)
        except KeyboardInterrupt as error:
            seen.append(error)

    thread = started(offer)
    assert here.wait(WAIT)
    notify = barrier._changed.notify_all

    def interrupted() -> None:
        monkeypatch.setattr(barrier._changed, "notify_all", notify)
        raise KeyboardInterrupt

    monkeypatch.setattr(barrier._changed, "notify_all", interrupted)
    with pytest.raises(KeyboardInterrupt):
        barrier.admit(lambda: 7)
    thread.join(WAIT)
    assert (len(seen), barrier._offer) == (1, None)
    assert barrier.admit(lambda: 7) == 7


@pytest.mark.usefixtures("patient")
def test_interrupt_ends_the_call_that_did_the_work_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was meant for the program; the barrier is open afterwards."""
    barrier, seen = Barrier(), []
    here = announcing(barrier, monkeypatch)

    def work() -> float:
        raise KeyboardInterrupt

    def offer() -> None:
        try:
            barrier.perform(work)
        except KeyboardInterrupt as error:
            seen.append(error)

    thread = started(offer)
    assert here.wait(WAIT)
    with pytest.raises(KeyboardInterrupt):
        barrier.admit(lambda: 7)
    thread.join(WAIT)
    assert len(seen) == 1
    assert barrier.admit(lambda: 8) == 8


def test_interrupt_while_calls_are_waited_for_opens_the_barrier(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever offered the work is told, and no later call waits for it."""
    barrier, entered, may_go = Barrier(), threading.Event(), threading.Event()

    def call() -> None:
        entered.set()
        assert may_go.wait(WAIT)

    calling = started(barrier.admit, call)
    assert entered.wait(WAIT)
    wait_for = barrier._changed.wait_for

    def interrupted(predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        if barrier._offer is not None and barrier._offer.begun:
            raise KeyboardInterrupt
        return wait_for(predicate, timeout)

    with monkeypatch.context() as patch:
        patch.setattr(barrier._changed, "wait_for", interrupted)
        with pytest.raises(KeyboardInterrupt):
            barrier.perform(lambda: 1.0)
    may_go.set()
    calling.join(WAIT)
    assert barrier._offer is None
    assert barrier.admit(lambda: 8) == 8


def test_gate_is_open_as_long_as_it_was_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the next thing is offered."""
    clock, slept = [0.0], []
    monkeypatch.setattr(barriers.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(barriers.time, "sleep", slept.append)

    def work() -> float:
        clock[0] += 3.0
        return 0.0

    barrier = Barrier()
    barrier.perform(work)
    barrier.perform(work)
    assert slept == [0.0, 3.0]


def test_call_within_a_call_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work that is offered meanwhile waits for the outer call, which waits for the inner."""
    monkeypatch.setattr(barriers, "_LONGEST", 0.01)
    barrier, seen = Barrier(), []

    def outer() -> str:
        thread = started(barrier.perform, lambda: seen.append("work") or 0.0)
        offered(barrier)
        inner = barrier.admit(lambda: "inner")
        thread.join(WAIT)
        return f"outer of {inner}"

    assert barrier.admit(outer) == "outer of inner"
    assert seen == ["work"]


@pytest.mark.usefixtures("patient")
def test_forked_child_passes_an_inherited_barrier(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is there to end what was under way."""
    barrier = Barrier()
    barrier._offer = barriers._Offer(lambda: 0.0)
    barrier._offer.begun = True
    monkeypatch.setattr(barriers.os, "getpid", lambda: barrier._process + 1)
    assert barrier.admit(lambda: 7) == 7


def test_forked_child_leaves_what_was_offered_in_its_parent() -> None:
    """The thread that offered it is not there: neither is the work done, nor waited for."""
    barrier, done = Barrier(), list[int]()
    barrier._process += 1
    barrier._offer = barriers._Offer(lambda: float(len(done.append(1) or done)))
    assert barrier.admit(lambda x: x + 1, 1) == 2
    assert done == []
