"""A served graph: which engine serves it, how its calls are answered, and how that changes.

An engine that raises costs the user only time. If the inputs are unchanged, the captured graph
answers that call, and the next candidate is compiled for the following calls.

Events concern the engine that serves. Another thread may replace that engine while a call runs. If
the call then fails, it is answered as the table says (:mod:`composer.runtime.table`), but the state
does not change.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from composer import _torch, session
from composer.chain import verify
from composer.chain.sandbox import Undecided
from composer.errors import SharedInputs, error_line
from composer.records import Runtime
from composer.runtime.background import Lull
from composer.runtime.table import TABLE, Answer, Event, Next, State
from composer.runtime.versions import UNSEEN, WRITTEN, Versions
from composer.system import control_flow, forks
from composer.system.memory import free_memory, lacks_memory

if TYPE_CHECKING:
    from composer.chain.select.decision import Decision
    from composer.graphs.comparison import Bounds
    from composer.runtime.backward import Backwards
    from composer.runtime.sampling import Sampler
    from composer.runtime.successors import Successors

Compiled = Callable[..., Any]

_NEVER = 1 << 62

_STARVED = 3
"""An engine is given up when it has lacked memory at this many calls."""


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
        is_provisional: True if all are to be measured anew when no other load is left.
    """

    engine: Engine | None
    order: tuple[int, ...] = ()
    skipped: tuple[int, ...] = ()
    is_provisional: bool = False


class _Kind(Enum):
    """The additional work at a call."""

    PLAIN = auto()
    BEGIN = auto()
    ADVANCE = auto()
    COMPARE = auto()


class _Wait(NamedTuple):
    """The quarantine of one engine: how many calls it lasts, and the number of its last call."""

    calls: int
    until: int


def is_recording() -> bool:
    """Return True if the program is recording a CUDA graph of its own."""
    import torch

    began = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return began and torch.cuda.is_current_stream_capturing()


class ServedGraph:
    """One graph, the engine that serves it, and the answers to its calls.

    Transitions are made with the lock held, and published after that. An ordinary call reads
    ``run`` and ``due`` without the lock. A process may be forked during a transition. The child
    can still answer, since every value that ``run`` has can answer a call.

    Args:
        built: The engine that serves first.
        successors: Builds the candidates of the graph, and keeps its record.
        runtime: Counts the calls.
        versions: Detects whether an engine wrote to its inputs.
        sampler: Compares every N-th call with eager; ``None`` if the policy does not ask for it.
        selects: True if a choice begins with the second call (``select`` with ``background``).

    Attributes:
        run: The callable that serves the graph now. It is replaced by a single assignment; a call
            ends with the callable that it began with.
        due: The tick (:attr:`Runtime.tick`) from which on a call may be special.
        engine: The engine that serves; ``None`` for eager, or after a failure.
        order: The places in the chain of the candidates that may serve, best first.
        resuming: The callable of a call at which an engine is built.
        state: The state.
        is_chosen: False as long as a choice is to come, after which ``order`` is that of the
            choice.
        lock: While it is held, no other thread changes the state.
        aside: Total seconds that calls have spent on anything other than their answer.
    """

    def __init__(
        self,
        built: Built,
        successors: Successors,
        runtime: Runtime,
        versions: Versions,
        sampler: Sampler | None = None,
        *,
        selects: bool = False,
    ) -> None:
        self.run: Compiled
        self.engine: Engine | None
        self.aside = 0.0
        self.lock = forks.lock()
        self.versions = versions
        self.resuming = self._resume  # bound once, since it is compared by identity
        self._successors = successors
        self._runtime = runtime
        self._sampler = sampler
        self._decision: Decision | Undecided | None = None
        self._following: Decision | Undecided | None = None
        self.order = built.order
        self.is_chosen = not selects
        self._place: int | None
        self._waits: dict[int, _Wait] = {}
        self._begin_at = 1 if selects else _NEVER
        self._lull: Lull | None = None
        self._every = sampler.every if sampler else _NEVER
        self._compare_at = self._every - 1
        self._retry_at = _NEVER
        self._leave_out(built.skipped)
        self.state = State.SERVING if built.engine else State.EAGER
        self._install(built.engine)
        self._await_lull(provisional=built.is_provisional)
        self._reschedule()

    # Changes of the engine

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
            if self.run is not run or engine is None or not self._successors.recovers:
                return
            if event is Event.LACKED and self.state is State.SERVING:
                self._starved += 1
                event = Event.STARVED if self._starved >= _STARVED else event
            if event is not Event.LACKED:
                self.run = self.resuming
                self.engine = None  # its memory is free for the next
                self._wait(engine.place, self._runtime.calls)
                self._successors.failed(error, what)
            self._happen(event)

    def advance(self, args: Sequence[Any]) -> Compiled:
        """Return the engine for a call at which an engine is to be built.

        That is the call after a failure, the one at which a quarantine ends, and the one after a
        choice in the background. If a candidate from quarantine is not accepted, its wait doubles,
        and the engine that serves stays.
        """
        with self._successors.compiling(), self.lock:
            if self._following is not None:
                self._follow(self._following, args)
            elif self.run is self.resuming:
                places = self.order[self._position() + 1 :]
                self._take(self._successors.build(places, args))
            else:
                self._retry(args)
            self._reschedule()
            return self.run

    def _follow(self, decision: Decision | Undecided, args: Sequence[Any]) -> None:
        try:
            built = self._successors.follow(decision, args, self.engine)
        except BaseException as error:
            control_flow.pass_on(error)  # the next call follows it
            self._following = None
            self.is_chosen = True  # nothing else is to come
            raise
        self._following = None
        self.order = built.order
        self._take(built)
        self.is_chosen = True
        self._await_lull(provisional=built.is_provisional)

    def _interrupted(self) -> None:
        """Leave to the next call what an interrupted one was to do.

        Another thread may hold the lock for as long as it builds. It reschedules when it is done.
        """
        self._decision = self._decision or self._following
        self._following = None
        if self.lock.acquire(timeout=0.1):
            try:
                self._reschedule()
            finally:
                self.lock.release()

    def decided(self, decision: Decision | Undecided) -> None:
        """Have the next call follow a decision of the background."""
        with self.lock:
            self._decision = decision
            self._update_due()

    def decided_anew(self, decision: Decision | Undecided) -> None:
        """Have the next call follow a decision in place of a provisional one, if it is surer."""
        if not isinstance(decision, Undecided):
            if decision.cpu_seconds:  # else what was set aside counts
                session.current().background.allowance.settle(decision.cpu_seconds)
            if decision.lasts and not decision.under_load:
                self.decided(decision)
                return
        self._await_lull(provisional=True)

    def free(self) -> None:
        """Note that the program has dropped the graph."""
        with self.lock:
            if self.state is not State.FREED:
                self._happen(Event.FREED)

    def _retry(self, args: Sequence[Any]) -> None:
        """Build the engines again whose quarantine is over, until one is accepted."""
        calls = self._runtime.calls
        for place in [each for each in self._preferred() if self._waits[each].until < calls]:
            engine = None
            try:
                engine = self._successors.rebuild(place, args)
            finally:  # a build that is interrupted has not ended the quarantine either
                if engine is None:
                    self._wait(place, calls - 1)  # another engine makes this call
                    self._reschedule()
            if engine is not None:
                self._happen(Event.ACCEPTED, engine)
                return

    def _take(self, built: Built) -> None:
        self._leave_out(built.skipped)
        self._happen(Event.ACCEPTED if built.engine else Event.EXHAUSTED, built.engine)

    def _happen(self, event: Event, engine: Engine | None = None) -> None:
        """Make the transition of the table; the caller holds the lock; ``engine`` is the new one.

        Raises:
            RuntimeError: the event cannot happen in this state.
        """
        row = TABLE.get((event, self.state))
        if row is None:
            raise RuntimeError(f"a served graph that is {self.state} cannot meet this: {event}")
        self.state = row.to
        if row.serves in (Next.NEW, Next.EAGER):
            self._install(engine)

    def _install(self, engine: Engine | None) -> None:
        self._starved = 0
        self.engine = engine
        self._place = None if engine is None else engine.place
        if engine is not None and engine.backwards is not None:
            report = functools.partial(self._backward_failed, engine.compiled)
            recovers = self._successors.recovers and not self._successors.collective
            engine.backwards.serve(report, recovers=recovers)
        self.run = self._successors.fallback if engine is None else engine.compiled

    @property
    def ranking(self) -> tuple[int, ...]:
        """The places from the engine that serves on, best first; empty for eager."""
        return self.order[self._position() :]

    def _position(self) -> int:
        """Return the index of the last engine in the order; the order's length for eager."""
        place, order = self._place, self.order
        return order.index(place) if place in order else len(order)

    def _preferred(self) -> list[int]:
        """Return the places of engines in quarantine that are preferred to the serving one."""
        return [place for place in self.order[: self._position()] if place in self._waits]

    def _leave_out(self, places: Sequence[int]) -> None:
        for place in places:
            if place not in self._waits:
                self._wait(place, self._runtime.calls)

    def _wait(self, place: int, since: int) -> None:
        """Put an engine into quarantine from call ``since`` on, twice as long as the last time."""
        self._successors.quarantine(place)
        if self._successors.retry_after is None:
            return
        before = self._waits.get(place)
        calls = 2 * before.calls if before else self._successors.retry_after
        self._waits[place] = _Wait(calls, since + calls)

    # The schedule of special calls

    def _reschedule(self) -> None:
        """Find the call of the next retry; with the lock held."""
        waits = [self._waits[place].until for place in self._preferred()]
        self._retry_at = min(waits, default=_NEVER) if self._successors.recovers else _NEVER
        self._update_due()

    def _update_due(self) -> None:
        """Note the tick of the next special call; with the lock held."""
        following = min(self._compare_at, self._retry_at, self._begin_at)
        self.due = 0 if self._decision is not None else following + self._runtime.reads

    def _await_lull(self, *, provisional: bool) -> None:
        """Look some calls later if a provisional choice may be made anew."""
        with self.lock:
            self._lull = (self._lull or Lull()) if provisional else None
            if self._lull is not None:
                self._begin_after(self._lull.calls)

    def _begin_after(self, calls: int) -> None:
        """Have a selection begin, or a lull looked for, some calls later."""
        with self.lock:
            self._begin_at = self._runtime.calls + calls
            self._update_due()

    def _kind_of(self, number: int, run: Compiled) -> _Kind:
        """Return the kind of the call with the tick ``number``; to be asked once for each call.

        A call does not wait for another one that builds an engine. The next call does what is due.
        """
        if not self.lock.acquire(blocking=False):
            is_compared = self._every == 1 and run is not self.resuming
            return _Kind.COMPARE if is_compared else _Kind.PLAIN
        try:
            call = number - self._runtime.reads
            kind = _Kind.PLAIN if run is self.resuming else self._scheduled(call)
            self._update_due()
            return kind
        finally:
            self.lock.release()

    def _scheduled(self, call: int) -> _Kind:
        """Return what is scheduled for a call, and mark it as done."""
        if call >= self._begin_at:
            self._begin_at = _NEVER
            return _Kind.BEGIN
        if self._decision is not None:  # other calls are not to wait for this one
            self._following = self._decision
            self._decision = None
            return _Kind.ADVANCE
        if call >= self._retry_at:
            self._retry_at = _NEVER
            return _Kind.ADVANCE
        if self._every == 1:  # every call is compared, in whatever order threads come here
            return _Kind.COMPARE
        if call >= self._compare_at:
            self._compare_at = call + self._every - (call + 1) % self._every
            return _Kind.COMPARE
        return _Kind.PLAIN

    # Answers

    def special(self, number: int, run: Compiled) -> tuple[Compiled, Compiled]:
        """Return the callable to blame if the call with this tick raises, and the one to call.

        If several threads call at once, only the first makes the comparison or the compile.
        """
        if is_recording():
            return run, run  # nothing may synchronize with the GPU now: special work is done later
        kind = self._kind_of(number, run)
        if kind is _Kind.BEGIN:
            return run, functools.partial(self._begin, run)
        if kind is _Kind.ADVANCE:
            return self.resuming, self.resuming
        return run, run if kind is _Kind.PLAIN else self._compared(run)

    def answer(
        self, error: BaseException, run: Compiled, args: tuple[Any, ...], before: object
    ) -> Any:
        """Answer a call at which an engine failed, as the table says.

        Args:
            error: The error that the engine raised.
            run: The engine's callable.
            args: The inputs of the call.
            before: The versions of the tensors before the call; ``None`` if they are not known.

        Returns:
            The outputs. ``None`` if the caller has to raise ``error``, because the engine had
            written to its inputs, other ranks may take part in the call, or nothing else can
            answer. The error is not raised here: this frame would be in its traceback and have it
            as an argument, a cycle that keeps the callers' tensors until a garbage collection.

        Raises:
            Exception: whatever the captured graph raises for these inputs.
        """
        # A call that builds an engine has answered for failures already, or had no engine to call.
        if run is self.resuming:
            return None
        if isinstance(error, _torch.modes.StopRecomputation):  # not a failure: a checkpoint is done
            return None
        if not self._successors.recovers or run is self._successors.fallback:
            self._runtime.failed(error)
            return None
        if isinstance(error, SharedInputs):
            outputs = self._successors.fallback(*args)
            self._runtime.failed(error, answered=True)
            return outputs
        return self._by_table(error, run, args, before, may_repeat=True)

    def _by_table(
        self,
        error: BaseException,
        run: Compiled,
        args: tuple[Any, ...],
        before: object,
        *,
        may_repeat: bool,
    ) -> Any:
        """Answer as the table says; a call is repeated only if ``may_repeat`` is true."""
        why = self._once_only(args, before)
        event = Event.WROTE if why else Event.LACKED if lacks_memory(error) else Event.RAISED
        answer = TABLE[event, State.SERVING].answer
        if answer is Answer.NOBODY:
            error.add_note(f"composer: {why}, so nobody can answer")
            self._failed(event, error, run)
            return None
        if answer is Answer.AGAIN and may_repeat:
            return self._again(error, run, args)
        try:
            outputs = self._successors.fallback(*args)
        except _torch.modes.StopRecomputation:  # not a failure of the eager fallback either
            self._failed(event, error, run)
            raise
        self._failed(event, error, run)
        return outputs

    def _again(self, error: BaseException, run: Compiled, args: tuple[Any, ...]) -> Any:
        """Repeat a call that lacked memory with emptied caches, then use the eager fallback.

        The engine keeps serving. It is given up if it lacks memory several times, because emptying
        caches at every call takes time. An error of the second call is a failure of its own.
        """
        self._runtime.failed(error)
        free_memory()
        before = self.versions.of(args)
        try:
            return verify.outputs_of(run(*args))
        except _torch.modes.StopRecomputation:  # not a failure: a checkpoint is done
            raise
        except BaseException as again:
            control_flow.pass_on(again)
            outputs = self._by_table(again, run, args, before, may_repeat=False)
            if outputs is None:
                raise
            return outputs

    def _once_only(self, args: tuple[Any, ...], before: object) -> str:
        """Return why a call that an engine has begun cannot be repeated; empty if it can."""
        if self._successors.collective:
            return "the engine may have begun what other ranks wait for"
        if before is None:
            return UNSEEN
        return "" if self.versions.of(args) == before else WRITTEN

    def _failed(
        self, event: Event, error: BaseException, run: Compiled, what: str = "raised"
    ) -> None:
        """Count an error of ``run``, make the transition, and tell the sinks."""
        answered = TABLE[event, State.SERVING].answer is not Answer.NOBODY
        self._runtime.failed(error, answered=answered)
        self.fail(event, run, error, what)
        self._successors.publish()

    def _backward_failed(self, run: Compiled, error: BaseException, answered: bool) -> None:
        """Handle an error in a backward of ``run``; ``answered`` is True if torch has answered."""
        event = Event.BACKWARD if answered else Event.BACKWARD_LOST
        if answered and lacks_memory(error):
            event = Event.LACKED
        self._failed(event, error, run, "its backward raised")

    def _begin(self, run: Compiled, *args: Any) -> Any:
        """Begin the background selection if it may, and answer the call by ``run``."""
        lull = self._lull
        tell = self.decided if lull is None else self.decided_anew
        with self._beside():
            try:
                if lull is None or lull.has_come():
                    self._successors.begin_selection(args, self.is_wanted, tell)
                else:
                    self._await_lull(provisional=True)
            except BaseException as error:  # noqa: BLE001  # recorded: the call is made all the same
                self._begin_after(0)  # if this is an interruption, the next call begins it
                control_flow.pass_on(error)
                self._begin_after(_NEVER)
                tell(Undecided(error_line(error)))
        return self._looked_at(run)(*args)

    def is_wanted(self) -> bool:
        """Return False if the program has dropped the graph."""
        return self.state is not State.FREED

    def _looked_at(self, run: Compiled) -> Compiled:
        """Return the callable for a special call; it is compared too if every call is compared."""
        return self._compared(run) if self._every == 1 else run

    def _compared(self, run: Compiled) -> Compiled:
        sampler, engine = self._sampler, self.engine
        if sampler is None or run is sampler.fallback:
            return run
        if engine is None or engine.compiled is not run:  # it was given up meanwhile
            return sampler.fallback
        return functools.partial(self._compare, sampler, engine)

    def _compare(self, sampler: Sampler, engine: Engine, *args: Any) -> Any:
        """Answer a call by an engine, or by eager if its numbers are wrong.

        Raises:
            Refusal: the numbers are wrong, and the policy wants errors.
        """
        with self._beside(engine.compiled) as timed:
            outputs, refusal = sampler.compare(timed, args, engine.bounds)
        if refusal is None:
            return outputs
        if not self._successors.recovers:
            try:
                raise refusal
            finally:
                del refusal  # its traceback holds this frame, which would be a cycle
        outputs = self._successors.fallback(*args)
        self._failed(Event.WRONG, refusal, engine.compiled)
        return outputs

    def _resume(self, *args: Any) -> Any:
        """Answer a call at which an engine is to be built.

        An error of the compile is recorded on the way out.
        """
        try:
            with self._beside(), self._runtime.waiting():
                run = self.advance(args)
        except BaseException as error:
            self._interrupted()
            control_flow.pass_on(error)
            self._runtime.failed(error)
            raise
        self._successors.publish()
        before = self.versions.of(args)
        try:
            return verify.outputs_of(self._looked_at(run)(*args))
        except BaseException as error:
            control_flow.pass_on(error)
            outputs = self.answer(error, run, args, before)
            if outputs is None:
                raise
            return outputs

    @contextlib.contextmanager
    def _beside(self, answer: Compiled | None = None) -> Iterator[Compiled]:
        """Add the time of a context to :attr:`aside`, except the time of ``answer``.

        Yields:
            A callable that calls ``answer`` and measures its time.
        """
        answering = 0.0

        def timed(*args: Any) -> Any:
            nonlocal answering
            began = time.perf_counter()
            try:
                return cast(Compiled, answer)(*args)
            finally:
                answering += time.perf_counter() - began

        started = time.perf_counter()
        try:
            yield timed
        finally:
            self.aside += time.perf_counter() - started - answering
