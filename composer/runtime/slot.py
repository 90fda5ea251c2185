"""The engine slot: which engine serves a graph now, and how that changes.

A slot has one :class:`State`. For each state and each :class:`Event`, :data:`TABLE` says who
answers the current call, which state follows, and who serves the next call. This module does not
use torch. It works through two ports: :class:`Calls`, which calls engines, and :class:`Chain`,
which builds engines and keeps the graph's record.

Events concern the engine that serves. Another thread may replace that engine while a call runs. If
the call then fails, it is answered as the table says, but the state does not change.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from composer.runtime.special_calls import NEVER, CallKind, Schedule
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
"""An engine is given up when it has lacked memory at this many calls."""


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
    """The state that follows an event, and who serves the next call."""

    SAME = State.SERVING, "the same engine"
    NEW = State.SERVING, "the new engine"
    PREVIOUS = State.SERVING, "the engine that it had replaced"
    PROBATION = State.PROBATION, "the new engine"
    TRIED = State.PROBATION, "the same engine"
    NEXT = State.QUARANTINED, "the next candidate, compiled at that call"
    EAGER = State.EAGER, "eager"
    NOBODY = State.FREED, "nobody"
    NEVER = None, "cannot happen"


class Row(NamedTuple):
    """A row of the table: who answers the call of an event, and what follows in each state."""

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
    Event.FASTER: Row(Answer.SAME, Then.PROBATION, *_NEVER[:4]),
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
    """The result of building candidates.

    Attributes:
        engine: The engine that was accepted; ``None`` if that is eager, or if none was.
        order: The places in the chain of all candidates that may serve, best first.
        skipped: The places of candidates that were in quarantine already.
    """

    engine: Engine | None
    order: tuple[int, ...] = ()
    skipped: tuple[int, ...] = ()


class Calls(Protocol):
    """The port to the code that calls engines."""

    def install(self, engine: Engine) -> Compiled:
        """Return an engine's callable, to serve from now on, and have its backwards reported."""

    def resume(self, *args: Any) -> Any:
        """Answer a call for which there is no engine yet, by :meth:`Slot.advance`'s engine."""


class Chain(Protocol):
    """The port to a graph's candidates, by their places in its chain, and to its record.

    Attributes:
        fallback: The eager fallback.
        recovers: True if another engine follows one that fails; else errors reach the caller.
        retry_after: Calls that an engine's first quarantine lasts; ``None`` for ever.
        collective: True if the graph has collectives. Then a call must not be repeated, because
            the other ranks would not repeat theirs.
    """

    fallback: Compiled
    recovers: bool
    retry_after: int | None
    collective: bool

    def compiling(self) -> AbstractContextManager[object]:
        """Hold torch's lock of compiles: a compile in another thread may call this graph."""

    def build(self, places: Sequence[int], args: Sequence[Any]) -> Built:
        """Build the candidates in turn until one is accepted for ``args``, and record them."""

    def rebuild(self, place: int, args: Sequence[Any]) -> Engine | None:
        """Build a candidate from quarantine again, and record it; ``None`` if not accepted."""

    def quarantine(self, place: int) -> None:
        """Exclude a candidate for this graph in the whole process."""

    def failed(self, error: BaseException, what: str) -> None:
        """Record that the engine failed; ``what`` is ``"raised"`` or ``"its backward raised"``."""

    def reverted(self) -> None:
        """Record that the engine which had been replaced serves again."""

    def publish(self) -> None:
        """Tell sinks and the user what was recorded. Called without the slot's lock."""


class Wait(NamedTuple):
    """The quarantine of one engine: how many calls it lasts, and the number of its last call."""

    calls: int
    until: int


class Slot:
    """One graph's engine slot.

    Transitions are made with the lock held, and published after that. An ordinary call reads
    ``run`` and ``due`` without the lock. A process may be forked during a transition. The child
    can still answer, since every value that ``run`` has can answer a call.

    Attributes:
        run: The callable that serves the graph now. It is replaced by a single assignment; a call
            ends with the callable that it began with.
        due: The tick (:attr:`Runtime.tick`) from which on a call may be special, by the schedule or
            because there is a barrier that every call has to pass.
        engine: The engine that serves; ``None`` for eager, or after a failure.
        resuming: The value of ``run`` after a failure, until another engine is built.
        lock: While it is held, no other thread changes the slot.
        barrier: A barrier that every call has to pass; ``None`` if there is none.
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
        """Return True if something else can serve the graph after ``run`` fails."""
        return self._chain.recovers and run is not self._chain.fallback

    def fail(self, event: Event, run: Compiled, error: BaseException, what: str = "raised") -> None:
        """Note a failure of the engine ``run``, unless it no longer serves.

        Args:
            event: The failure.
            run: The engine's callable.
            error: The error.
            what: What happened: ``"raised"`` or ``"its backward raised"``.
        """
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
        """Return the engine for the first call after a failure: the next candidate accepted."""
        with self._chain.compiling(), self.lock:
            if self.run is self.resuming:
                built = self._chain.build(self._order[self._position() + 1 :], args)
                self._leave_out(built.skipped)
                self._happen(Event.ACCEPTED if built.engine else Event.EXHAUSTED, built.engine)
                self._reschedule()
            return self.run

    def retry(self, args: Sequence[Any]) -> Compiled:
        """Return the engine for a call at which a quarantine ends.

        The engine in quarantine is built again. If it is not accepted, its wait doubles, and the
        engine that serves stays.
        """
        with self._chain.compiling(), self.lock:
            if self.run is self.resuming:  # an engine failed meanwhile, and that comes first
                return self.run
            calls = self._runtime.calls
            for place in [each for each in self._preferred() if self._waits[each].until < calls]:
                engine = None
                try:
                    engine = self._chain.rebuild(place, args)
                finally:  # a build that is interrupted has not ended the quarantine either
                    if engine is None:
                        self._wait(place, calls - 1)  # another engine makes this call
                        self._reschedule()
                if engine is not None:
                    self._happen(Event.ACCEPTED, engine)
                    break
            self._reschedule()
            return self.run

    def take_over(self, built: Built, *, keeps: bool) -> None:
        """Let the choice of background selection serve from the next call on.

        The caller holds the lock. The choice may be the engine that serves already.

        Args:
            built: The choice.
            keeps: True if the replaced engine is kept for a while, in case the new one fails.
        """
        self._order = built.order
        self._leave_out(built.skipped)
        if built.engine and built.engine.place == self._place:
            return
        faster = Event.FASTER if keeps and self._chain.recovers else Event.ACCEPTED
        self._happen(faster if built.engine else Event.EXHAUSTED, built.engine)
        self._reschedule()

    def is_wanted(self, run: Compiled) -> bool:
        """Return True if the program can still call the graph and ``run`` serves it."""
        if self.called_by() is None:
            with self.lock:
                self._happen(Event.FREED)
        return self.state is not State.FREED and self.run is run

    def kind_of(self, number: int, run: Compiled) -> CallKind:
        """Return the kind of the call with the tick ``number``; to be asked once for each call."""
        with self.lock:
            call = number - self._runtime.reads
            if call >= self._schedule.let_go_at:
                self._happen(Event.SETTLED)
            kind = CallKind.PLAIN if run is self.resuming else self._schedule.kind_of(call)
            self._update_due()
        return kind

    @contextlib.contextmanager
    def barred(self) -> Iterator[Barrier]:
        """Make every call pass a barrier while the context lasts."""
        barrier = Barrier()
        try:
            self._set_barrier(barrier)
            yield barrier
        finally:
            self._set_barrier(None)

    def _happen(self, event: Event, engine: Engine | None = None) -> Then:
        """Make the transition of the table; the caller holds the lock; ``engine`` is the new one.

        Raises:
            RuntimeError: the event cannot happen in this state.
        """
        then: Then = getattr(TABLE[event], self.state)
        state, previous = then.value[0], self._previous
        if state is None:
            raise RuntimeError(f"an engine slot that is {self.state} cannot meet this: {event}")
        if then is Then.PROBATION:
            self._previous = self.engine
            self._schedule.let_go_at = self._runtime.calls + _PROBATION
        elif state is not State.PROBATION:
            self._previous = None
            self._schedule.let_go_at = NEVER
        self.state = state
        if then in (Then.NEW, Then.PROBATION):
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
        """Return the index of the last engine in the order; the order's length for eager."""
        place, order = self._place, self._order
        return order.index(place) if place in order else len(order)

    def _preferred(self) -> list[int]:
        """Return the places of engines in quarantine that are preferred to the serving one."""
        return [place for place in self._order[: self._position()] if place in self._waits]

    def _leave_out(self, places: Sequence[int]) -> None:
        for place in places:
            if place not in self._waits:
                self._wait(place, self._runtime.calls)

    def _wait(self, place: int, since: int) -> None:
        """Put an engine into quarantine from call ``since`` on, twice as long as the last time."""
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
