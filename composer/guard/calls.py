"""Around the compiled callable, at every call: as little as can be while all is well.

An engine that raises costs its user nothing but time: what its inputs were is still there, so the
captured graph answers that call, and the next engine is compiled for those that follow.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast

from composer import _torch
from composer.guard.gate import Gate
from composer.guard.sampling import Sampler
from composer.guard.schedule import Kind, Schedule
from composer.guard.standby import WRITTEN, Compiled, Engine, Later, Rescue, Seat, TakeOver
from composer.guard.versions import UNREADABLE, Versions
from composer.memory import free_memory, lacks_memory
from composer.records import Runtime

_TIMED = 16
"""The first so many calls are timed, then one in so many, which stands for the others."""

_TRIED = 32
"""Calls that one which took over serves before the one it followed is let go."""

_STARVED = 3
"""Calls for which an engine may lack the memory before the next one is compiled."""

T = TypeVar("T")


def watch(
    engine: Engine,
    runtime: Runtime,
    restore: Callable[[Sequence[Any]], Any] | None = None,
    rescue: Rescue | None = None,
    sampler: Sampler | None = None,
    later: Later | None = None,
) -> Compiled:
    """Count the calls of ``engine``, time some, and answer for it.

    Engines hand over callables that Dynamo must not trace. One such wrapper is enough, and Dynamo
    puts its own where it finds ours, so theirs is taken off: each costs about 0.4 us a call. What
    all of this costs is measured by bench/overhead.py.

    Args:
        engine: What serves the graph.
        runtime: Where calls are counted.
        restore: Makes the caller's structure of the flat outputs; for graphs of direct calls.
        rescue: What to do when it raises, or is wrong; ``None`` lets the error through.
        sampler: What compares a call every so often; ``None`` where nobody asked for that.
        later: What begins with the second call.
    """
    versions = Versions(rescue)
    tick, read, unread = runtime.tick, versions.read, versions.unread
    served = _Served(engine, runtime, rescue, sampler, later, versions)

    def call(*args: Any) -> Any:
        number = tick()
        run = serve = served.run
        before: object = unread
        try:
            if read is not None:
                try:
                    before = read(args)
                except UNREADABLE:  # nobody can tell then what was written
                    before = None
            if number >= served.due:
                run, serve = served.special(number, run)
            if number >= _TIMED and number % _TIMED:
                outputs = serve(*args)
            else:
                started = time.perf_counter()
                outputs = serve(*args)
                taken = time.perf_counter() - started
                runtime.spent(taken if number < _TIMED else taken * _TIMED)
            if outputs is None:
                raise TypeError("the engine returned None")
            return outputs
        except Exception as error:  # noqa: BLE001  # answered for, or raised again
            return served.answer(error, run, args, before)

    served.called_by = weakref.ref(call)

    def call_and_restore(*args: Any) -> Any:
        return cast(Callable[..., Any], restore)(call(*args))

    return _torch.disabled(call if restore is None else call_and_restore)


class _Served:
    """Who runs a graph now, and who answers for it. ``run`` is replaced whole, between calls.

    ``due`` is the tick from which on a call may be special, by its ``_schedule`` or because there
    is a ``_gate``: then every call goes through that. ``_before`` is the engine that was taken over
    from. ``_first`` is whose place what begins is about. ``called_by`` is who calls.
    """

    __slots__ = (
        "_before",
        "_first",
        "_gate",
        "_later",
        "_lock",
        "_rescue",
        "_resuming",
        "_retrying",
        "_runtime",
        "_sampler",
        "_schedule",
        "_starved",
        "_versions",
        "called_by",
        "due",
        "run",
    )

    def __init__(
        self,
        engine: Engine,
        runtime: Runtime,
        rescue: Rescue | None,
        sampler: Sampler | None,
        later: Later | None,
        versions: Versions,
    ) -> None:
        self.called_by: Callable[[], object] = lambda: None
        self._later = later
        self._before: Engine | None = None
        self._gate: Gate | None = None
        self._sampler = sampler
        self._schedule = Schedule(sampler.every if sampler else None, begins=later is not None)
        self._starved = 0
        self._versions = versions
        self._rescue = rescue
        self._resuming, self._retrying = self._resume, self._retry
        self._runtime = runtime
        self._lock = threading.RLock()
        self.run = self._installed(engine)
        self._first = self.run if later else None
        self._reschedule()

    def _installed(self, engine: Engine) -> Compiled:
        """What to call; its backwards are answered for from now on."""
        run = _torch.undisabled(engine.compiled)
        if engine.backwards is not None:
            told = functools.partial(self._backward_failed, run)
            engine.backwards.serve(told, answers=self._may_answer(run))
        return run

    def _may_follow(self, run: Compiled) -> bool:
        """Whether there is another to serve the graph if ``run`` raises."""
        return self._rescue is not None and run is not self._rescue.floor

    def _may_answer(self, run: Compiled) -> bool:
        """Whether the graph that a backward of ``run`` was made from may be run in its place."""
        return self._may_follow(run) and not cast(Rescue, self._rescue).collective

    def _reschedule(self) -> None:
        """Note when a call is to be special; with the lock held."""
        self._schedule.retry(self._rescue.retry_at() if self._rescue else None)
        self._look_ahead()

    def _look_ahead(self) -> None:
        """Note which is the next special call; with the lock held."""
        self.due = 0 if self._gate else self._schedule.next + self._runtime.reads

    def answer(self, error: Exception, run: Compiled, args: tuple[Any, ...], before: object) -> Any:
        """Answer a call for the engine ``run``, which raised ``error``.

        Raises:
            Exception: the error itself, if the engine wrote to its inputs before, other ranks may
                take part in the call, or nobody is there to answer; whatever the captured graph
                raises for these inputs.
        """
        rescue = self._rescue
        # These have answered for their engine, or have none to call.
        if run is self._resuming or run is self._retrying:
            raise error
        if isinstance(error, _torch.StopRecomputation):  # a checkpoint has what it wants
            raise error
        if rescue is None or run is rescue.floor:
            self._runtime.failed(error)
            raise error
        written = before is None or self._versions.of(args) != before
        if why := rescue.once_only or (WRITTEN if written else ""):
            error.add_note(f"composer: {why}, so nobody can answer")
            self._runtime.failed(error)
            self._hand_over(error, run)
            raise error
        if lacks_memory(error):
            return self._with_more_memory(error, run, rescue, args)
        outputs = rescue.floor(*args)
        self._runtime.failed(error, answered=True)
        self._hand_over(error, run)
        return outputs

    def special(self, number: int, run: Compiled) -> tuple[Compiled, Compiled]:
        """Who makes this call, ``run`` or an engine out of quarantine, and in which way."""
        gate = self._gate
        run, serve = self._way_of(number, run)
        return run, serve if gate is None else functools.partial(gate.admit, serve)

    def _way_of(self, number: int, run: Compiled) -> tuple[Compiled, Compiled]:
        """As :meth:`special`, but for a gate.

        Of several threads the quickest has the comparison, or the compile.
        """
        with self._lock:
            call, sampler = number - self._runtime.reads, self._sampler
            if self._schedule.lets_go(call):
                self._let_go()
            kind = Kind.PLAIN if run is self._resuming else self._schedule.kind_of(call)
            self._look_ahead()
        if kind is Kind.BEGIN:
            return run, functools.partial(self._begin, run)
        if kind is Kind.RETRY:
            return self._retrying, self._retrying
        if kind is Kind.PLAIN or sampler is None or run is sampler.floor:
            return run, run
        return run, functools.partial(self._compare, sampler, run)

    def _begin(self, run: Compiled, *args: Any) -> Any:
        """Answer a call by ``run``, and begin what goes on beside those that follow.

        The one that this is about may have failed at the first call: its seat is not wanted then.
        """
        first = cast(Compiled, self._first)
        seat = Seat(
            lambda: self.called_by() is not None and self.run is first,
            functools.partial(self._take_over, first),
            self._gated,
        )
        cast(Later, self._later).begin(args, first, seat)
        self._later = self._first = None
        return run(*args)

    @contextlib.contextmanager
    def _gated(self) -> Iterator[Gate]:
        """Have every call go through a gate meanwhile."""
        gate = Gate()
        try:
            self._put_up(gate)
            yield gate
        finally:
            self._put_up(None)

    def _put_up(self, gate: Gate | None) -> None:
        with self._lock:
            self._gate = gate
            self._look_ahead()

    def _take_over(self, run: Compiled, chosen: TakeOver) -> None:
        """Serve by another in place of ``run``; calls under way end as they began."""
        with self._lock:
            served = self.run is run
            engine, keeps = chosen(served)
            if engine is None or not served:
                return
            self.run = self._installed(engine)
            if keeps and self._rescue is not None:
                self._before = Engine(run)
                self._schedule.let_go(self._runtime.calls + _TRIED)
            self._reschedule()

    def _let_go(self) -> None:
        self._before = None
        self._schedule.let_go(None)

    def _compare(self, sampler: Sampler, run: Compiled, *args: Any) -> Any:
        """Answer a call by ``run``, or by the floor where ``run`` computes something else.

        Raises:
            Refusal: it does, and the policy wants errors.
        """
        outputs, refusal = sampler.compare(run, args)
        if refusal is None:
            return outputs
        if self._rescue is None:
            raise refusal
        self._runtime.failed(refusal, answered=True)
        outputs = self._rescue.floor(*args)
        self._hand_over(refusal, run)
        return outputs

    def _with_more_memory(
        self, error: Exception, run: Compiled, rescue: Rescue, args: tuple[Any, ...]
    ) -> Any:
        """Once more with caches emptied, then by the floor; the engine may have it next time.

        One that never has enough is given up: emptying caches takes its time at every call.
        """
        free_memory()
        before = self._versions.of(args)
        try:
            return _given(run(*args))
        except Exception as again:
            if self._versions.of(args) != before:
                self._runtime.failed(again)
                raise
        outputs = rescue.floor(*args)
        self._runtime.failed(error, answered=True)
        self._lacked_memory(error, run)
        return outputs

    def _lacked_memory(self, error: Exception, run: Compiled, what: str = "raised") -> None:
        self._starved += 1
        if self._starved >= _STARVED:
            self._hand_over(error, run, what)

    def _backward_failed(self, run: Compiled, error: Exception, answered: bool) -> None:
        """Hear of an error in a backward of the engine ``run``."""
        self._runtime.failed(error, answered=answered)
        if not self._may_follow(run):
            return
        what = "its backward raised"
        if answered and lacks_memory(error):
            self._lacked_memory(error, run, what)
        else:
            self._hand_over(error, run, what)

    def _hand_over(self, error: Exception, run: Compiled, what: str = "raised") -> None:
        """Never call ``run`` again; a failure in another thread may have seen to that already.

        It is recorded before any other thread can have the next candidate compiled.
        """
        with self._lock:
            if self.run is run:
                self.run = self._resuming
                rescue = cast(Rescue, self._rescue)
                rescue.blame(error, what)
                if self._before is not None:
                    self.run = self._installed(self._before)
                    self._let_go()
                    rescue.reverted()
                    self._reschedule()

    def _resume(self, *args: Any) -> Any:
        """The first call after a failure: have the next candidate compiled, and call it."""
        # Dynamo's lock first: a compile in another thread may call this very graph.
        with _torch.compiling(), self._lock:
            if self.run is self._resuming:
                self.run = self._installed(self._made(cast(Rescue, self._rescue).successor, args))
                self._starved = 0
                self._reschedule()
            run = self.run
        return self._guarded(run, args)

    def _retry(self, *args: Any) -> Any:
        """A call before which an engine in quarantine is tried again."""
        with _torch.compiling(), self._lock:
            if self.run is not self._resuming:  # no other thread has seen a failure since
                engine = self._made(cast(Rescue, self._rescue).retry, args)
                if engine is not None:
                    self.run = self._installed(engine)
                    self._starved = 0
                self._reschedule()
            run = self.run
        return self._guarded(run, args)

    def _made(self, make: Callable[[Sequence[Any]], T], args: tuple[Any, ...]) -> T:
        try:
            return make(args)
        except Exception as error:
            self._runtime.failed(error)
            raise

    def _guarded(self, run: Compiled, args: tuple[Any, ...]) -> Any:
        before = self._versions.of(args)
        try:
            return _given(run(*args))
        except Exception as error:  # noqa: BLE001  # answered for, or raised again
            return self.answer(error, run, args, before)


def _given(outputs: Any) -> Any:
    if outputs is None:
        raise TypeError("the engine returned None")
    return outputs
