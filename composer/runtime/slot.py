"""The engine slot: which engine serves a graph now, and how that changes.

A slot has one :class:`State`, and :data:`TABLE` says for each state and each :class:`Event` who
answers the call at hand, which state follows, and who serves the next call. Nothing here knows of
torch. The parts that do are given as two ports: :class:`Calls`, which calls engines, and
:class:`Chain`, which builds them and keeps the graph's record.

An event is always one of the engine that serves. A call may end with an engine that another thread
has given up meanwhile. That call is answered as the table says, and the state stays.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from composer.runtime.schedule import NEVER, CallKind, Schedule
from composer.system import forks
from composer.system.barrier import Barrier

if TYPE_CHECKING:
    from composer.graphs.comparison import Bounds
    from composer.records import Runtime
    from composer.runtime.backward import Backwards

Compiled = Callable[..., Any]

_PROBATION = 32
"""Calls that an engine which took over has to serve before the one it replaced is released."""

_STARVED = 3
"""Calls for which an engine may lack the memory before it is given up."""


class State(StrEnum):
    """The states of a slot."""

    SERVING = "serving"
    PROBATION = "probation"
    QUARANTINED = "quarantined"
    EAGER = "eager"
    FREED = "freed"


class Event(StrEnum):
    """The events that a slot knows."""

    RAISED = "the engine raises"
    WROTE = "it raises and may have written to its inputs, or other ranks take part"
    WRONG = "a sampled call shows wrong numbers"
    BACKWARD = "its backward raises"
    LACKED = "it lacks memory, for the first or second time"
    STARVED = "it lacks memory for the third time"
    ACCEPTED = "another engine is compiled and accepted, for its turn or after its quarantine"
    EXHAUSTED = "no engine is left, or eager is found to be the fastest"
    FASTER = "background selection finds a faster engine"
    SETTLED = "the faster engine has served 32 calls"
    FORKED = "the process is forked, in the child"
    FREED = "the program drops the graph"


class Answer(StrEnum):
    """Who answers the call at hand."""

    EAGER = "eager"
    NOBODY = "nobody: the error is raised"
    TORCH = "torch's own backward, or nobody"
    AGAIN = "the engine once more, then eager"
    SERVING = "whoever serves next"
    SAME = "whoever has begun it"


class Then(Enum):
    """The state that follows, and who serves the next call."""

    SAME = State.SERVING, "the same engine"
    NEW = State.SERVING, "the new engine"
    PREVIOUS = State.SERVING, "the engine that it had replaced"
    TRIAL = State.PROBATION, "the new engine"
    TRIED = State.PROBATION, "the same engine"
    NEXT = State.QUARANTINED, "the next candidate, compiled at that call"
    EAGER = State.EAGER, "eager"
    NOBODY = State.FREED, "nobody"
    NEVER = None, "cannot happen"


class Row(NamedTuple):
    """Who answers the call at which an event happens, and what follows in each state."""

    answer: Answer
    serving: Then
    probation: Then
    quarantined: Then
    eager: Then
    freed: Then


_FAILURE = (Then.NEXT, Then.PREVIOUS, Then.NEVER, Then.NEVER, Then.NOBODY)
_NEVER = (Then.NEVER,) * 5
_STAYS = (Then.SAME, Then.TRIED, Then.NEXT, Then.EAGER, Then.NOBODY)
TABLE: Mapping[Event, Row] = {
    Event.RAISED: Row(Answer.EAGER, *_FAILURE),
    Event.WROTE: Row(Answer.NOBODY, *_FAILURE),
    Event.WRONG: Row(Answer.EAGER, *_FAILURE),
    Event.BACKWARD: Row(Answer.TORCH, *_FAILURE),
    Event.LACKED: Row(Answer.AGAIN, *_STAYS[:2], *_NEVER[:2], Then.NOBODY),
    Event.STARVED: Row(Answer.AGAIN, *_FAILURE),
    Event.ACCEPTED: Row(Answer.SERVING, *(Then.NEW,) * 4, Then.NEVER),
    Event.EXHAUSTED: Row(Answer.SERVING, *(Then.EAGER,) * 4, Then.NEVER),
    Event.FASTER: Row(Answer.SAME, Then.TRIAL, *_NEVER[:4]),
    Event.SETTLED: Row(Answer.SAME, Then.NEVER, Then.SAME, *_NEVER[:3]),
    Event.FORKED: Row(Answer.SAME, *_STAYS),
    Event.FREED: Row(Answer.SAME, *(Then.NOBODY,) * 5),
}
"""What follows from each event in each state."""


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine that was accepted for a graph.

    Attributes:
        compiled: Its callable.
        place: Its place in the graph's chain.
        bounds: How far its numbers may be off eager's.
        backwards: The backwards that were compiled with it.
    """

    compiled: Compiled
    place: int
    bounds: Bounds
    backwards: Backwards | None = None


@dataclass(frozen=True, slots=True)
class Built:
    """What came of building candidates.

    Attributes:
        engine: The one that is accepted; ``None`` where it is eager, or none.
        order: The places in the chain of all that may serve, best first.
        skipped: The places of those that were in quarantine already.
    """

    engine: Engine | None
    order: tuple[int, ...] = ()
    skipped: tuple[int, ...] = ()


class Calls(Protocol):
    """The port to what calls engines."""

    def install(self, engine: Engine) -> Compiled:
        """The callable that serves from now on, with the engine's backwards reported."""

    def resume(self, *args: Any) -> Any:
        """Answer a call for which there is no engine yet, by that of :meth:`Slot.advance`."""


class Chain(Protocol):
    """The port to a graph's candidates, by their places in its chain, and to its record.

    Attributes:
        fallback: The eager fallback.
        recovers: Whether an engine that fails is followed; else its errors reach the caller.
        retry_after: Calls that an engine in quarantine waits at first; ``None`` for ever.
        collective: Whether the graph waits for other ranks, which would not wait a second time.
    """

    fallback: Compiled
    recovers: bool
    retry_after: int | None
    collective: bool

    def compiling(self) -> AbstractContextManager[object]:
        """Hold torch's lock of compiles: a compile in another thread may call this graph."""

    def build(self, places: Sequence[int], args: Sequence[Any]) -> Built:
        """The first of these candidates that is accepted for the inputs ``args``; recorded."""

    def rebuild(self, place: int, args: Sequence[Any]) -> Engine | None:
        """A candidate from quarantine, built once more; recorded. ``None``: not accepted."""

    def quarantine(self, place: int) -> None:
        """Have the whole process leave a candidate out for this graph."""

    def failed(self, error: BaseException, what: str) -> None:
        """Record that the engine failed, and what did: ``"raised"``, ``"its backward raised"``."""

    def reverted(self) -> None:
        """Record that the engine which had been replaced serves again."""

    def publish(self) -> None:
        """Tell sinks and the user what was recorded. Called without the slot's lock."""


class Wait(NamedTuple):
    """The quarantine of one engine: how many calls it lasts, and the last of these."""

    calls: int
    until: int


class Slot:
    """One graph's engine slot.

    Transitions are made with the lock held, and published after that. An ordinary call reads
    ``run`` and ``due`` without it. A process may be forked in the midst of a transition: whatever
    ``run`` is then can answer, and the child makes anew what it needs.

    Attributes:
        run: Serves the graph now. It is replaced whole, between calls; calls under way end with
            the one that they began with.
        due: The tick (:attr:`Runtime.tick`) from which on a call may be special, by the schedule or
            because there is a barrier that every call has to pass.
        engine: The engine that serves; ``None`` for eager, or where it has failed.
        resuming: What ``run`` is after a failure, until there is another engine.
        lock: While it is held, no other thread changes the slot.
        barrier: Every call has to pass it, where there is one.
        called_by: A weak reference to the callable that the program holds.
    """

    def __init__(
        self, built: Built, calls: Calls, chain: Chain, runtime: Runtime, schedule: Schedule
    ) -> None:
        self.run: Compiled
        self.engine: Engine | None
        self._place: int | None
        self.lock = forks.lock()
        self.barrier: Barrier | None = None
        self.called_by: Callable[[], object] = lambda: None
        self._calls, self._chain, self._runtime, self._schedule = calls, chain, runtime, schedule
        self.resuming = calls.resume  # bound once, since it is compared by identity
        self._order = built.order
        self._previous: Engine | None = None
        self._waits: dict[int, Wait] = {}
        self._leave_out(built.skipped)
        self.state = State.SERVING if built.engine else State.EAGER
        self._install(built.engine)
        self._reschedule()

    def follows(self, run: Compiled) -> bool:
        """Whether something else can serve the graph if ``run`` fails."""
        return self._chain.recovers and run is not self._chain.fallback

    def fail(self, event: Event, run: Compiled, error: BaseException, what: str = "raised") -> None:
        """Note a failure of the engine ``run``, unless it serves no more; ``what`` did it."""
        with self.lock:
            engine = self.engine
            if self.run is not run or engine is None or not self._chain.recovers:
                return
            self._starved += event is Event.LACKED
            if event is Event.LACKED and self._starved < _STARVED:
                self._happen(event)
                return
            event = Event.STARVED if event is Event.LACKED else event
            self.run, self.engine = self.resuming, None  # its memory is free for the next
            self._wait(engine.place, self._runtime.calls)
            self._chain.failed(error, what)
            if self._happen(event) is Then.PREVIOUS:
                self._chain.reverted()
                self._reschedule()

    def advance(self, args: Sequence[Any]) -> Compiled:
        """The engine for the first call after a failure: the next candidate that is accepted."""
        with self._chain.compiling(), self.lock:
            if self.run is self.resuming:
                built = self._chain.build(self._order[self._position() + 1 :], args)
                self._leave_out(built.skipped)
                self._happen(Event.ACCEPTED if built.engine else Event.EXHAUSTED, built.engine)
                self._reschedule()
            return self.run

    def retry(self, args: Sequence[Any]) -> Compiled:
        """The engine for a call at which a quarantine is over: that one, if it is accepted now.

        The wait of one that is not accepted doubles.
        """
        with self._chain.compiling(), self.lock:
            if self.run is self.resuming:  # an engine failed meanwhile, and that comes first
                return self.run
            calls = self._runtime.calls
            for place in [each for each in self._preferred() if self._waits[each].until < calls]:
                engine = self._chain.rebuild(place, args)
                if engine is not None:
                    self._happen(Event.ACCEPTED, engine)
                    break
                self._wait(place, calls - 1)  # this call is made by another
            self._reschedule()
            return self.run

    def take_over(self, built: Built, *, keeps: bool) -> None:
        """Have what background selection chose serve from the next call on; with the lock held.

        It may be the same engine as before. The one that is replaced is kept, if ``keeps``.
        """
        self._order = built.order
        self._leave_out(built.skipped)
        if built.engine and built.engine.place == self._place:
            return
        faster = Event.FASTER if keeps and self._chain.recovers else Event.ACCEPTED
        self._happen(faster if built.engine else Event.EXHAUSTED, built.engine)
        self._reschedule()

    def is_wanted(self, run: Compiled) -> bool:
        """Whether the graph can still be called, and ``run`` serves it."""
        if self.called_by() is None:
            with self.lock:
                self._happen(Event.FREED)
        return self.state is not State.FREED and self.run is run

    def kind_of(self, number: int, run: Compiled) -> CallKind:
        """The kind of the call with the tick ``number``, by ``run``; asked once for each call."""
        with self.lock:
            call = number - self._runtime.reads
            if call >= self._schedule.let_go_at:
                self._happen(Event.SETTLED)
            kind = CallKind.PLAIN if run is self.resuming else self._schedule.kind_of(call)
            self._update_due()
        return kind

    @contextlib.contextmanager
    def barred(self) -> Iterator[Barrier]:
        """Have every call pass a barrier, for as long as the context lasts."""
        barrier = Barrier()
        try:
            self._set_barrier(barrier)
            yield barrier
        finally:
            self._set_barrier(None)

    def _happen(self, event: Event, engine: Engine | None = None) -> Then:
        """Make the transition of the table, with the lock held; ``engine`` is the new one.

        Raises:
            RuntimeError: the event cannot happen in this state.
        """
        then: Then = getattr(TABLE[event], self.state)
        state, previous = then.value[0], self._previous
        if state is None:
            raise RuntimeError(f"an engine slot that is {self.state} cannot meet this: {event}")
        if then is Then.TRIAL:
            self._previous = self.engine
            self._schedule.let_go_at = self._runtime.calls + _PROBATION
        elif state is not State.PROBATION:
            self._previous = None
            self._schedule.let_go_at = NEVER
        self.state = state
        if then in (Then.NEW, Then.TRIAL):
            self._install(engine)
        elif then is Then.PREVIOUS:
            self._install(previous)
        elif event is Event.EXHAUSTED:
            self._install(None)
        return then

    def _install(self, engine: Engine | None) -> None:
        run = self._chain.fallback if engine is None else self._calls.install(engine)
        place = None if engine is None else engine.place
        self._starved, self.engine, self._place, self.run = 0, engine, place, run

    def _position(self) -> int:
        """Where the last engine stands in the order; behind its end for eager."""
        place, order = self._place, self._order
        return order.index(place) if place in order else len(order)

    def _preferred(self) -> list[int]:
        """The places of engines in quarantine that are before the one that serves, in order."""
        return [place for place in self._order[: self._position()] if place in self._waits]

    def _leave_out(self, places: Sequence[int]) -> None:
        for place in places:
            if place not in self._waits:
                self._wait(place, self._runtime.calls)

    def _wait(self, place: int, since: int) -> None:
        """Put an engine into quarantine from this call on, for twice as long as the last time."""
        self._chain.quarantine(place)
        if self._chain.retry_after is None:
            return
        before = self._waits.get(place)
        calls = 2 * before.calls if before else self._chain.retry_after
        self._waits[place] = Wait(calls, since + calls)

    def _reschedule(self) -> None:
        """Put the next retry into the schedule; with the lock held."""
        waits = [self._waits[place].until for place in self._preferred()]
        self._schedule.retry_at = min(waits, default=NEVER) if self._chain.recovers else NEVER
        self._update_due()

    def _set_barrier(self, barrier: Barrier | None) -> None:
        with self.lock:
            self.barrier = barrier
            self._update_due()

    def _update_due(self) -> None:
        """Note the tick of the next special call; with the lock held."""
        self.due = 0 if self.barrier else self._schedule.next + self._runtime.reads
