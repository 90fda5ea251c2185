"""Who serves a graph at the moment, and how that changes when an engine fails or is overtaken.

An engine that raises costs its user nothing but time: its inputs are still what they were, so the
captured graph answers that call, and the next candidate is compiled for the calls that follow.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast

import torch

from composer import _torch, forks, interrupts, verify
from composer.errors import SharedInputs
from composer.memory import free_memory, lacks_memory
from composer.records import Runtime
from composer.runtime.barrier import Barrier
from composer.runtime.roles import (
    UNSEEN,
    WRITTEN,
    Compiled,
    Engine,
    Later,
    Rescue,
    Seat,
    TakeOver,
)
from composer.runtime.sampling import Sampler
from composer.runtime.schedule import CallKind, Schedule
from composer.runtime.versions import Versions

_PROBATION = 32
"""Calls that an engine which took over has to serve before the one it replaced is released."""

_STARVED = 3
"""Calls for which an engine may lack the memory before the next one is compiled."""

T = TypeVar("T")


def _is_recording() -> bool:
    """Whether the program records a CUDA graph of its own by the calls that it makes now."""
    began = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return began and torch.cuda.is_current_stream_capturing()


class ServedGraph:
    """One graph's current engine, and the transitions to another one.

    Transitions are made with the lock held, and told to sinks after that; an ordinary call reads
    ``run`` and ``due`` without it. A process may be forked in the midst of one: whatever ``run`` is
    then can answer, and the child makes anew what it needs.

    Attributes:
        run: What serves the graph now. It is replaced whole, between calls; calls under way end
            with the one that they began with.
        due: The tick (:attr:`Runtime.tick`) from which on a call may be special, by the schedule or
            because there is a barrier that every call has to pass.
        called_by: A weak reference to the callable that the program holds.
        aside: Seconds that calls spent so far on anything but their answer.
    """

    __slots__ = (
        "_barrier",
        "_incumbent",
        "_later",
        "_lock",
        "_previous",
        "_rescue",
        "_resuming",
        "_retrying",
        "_runtime",
        "_sampler",
        "_schedule",
        "_starved",
        "_versions",
        "aside",
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
        self.aside = 0.0
        self._later = later
        self._previous: Engine | None = None
        self._barrier: Barrier | None = None
        self._sampler = sampler
        self._schedule = Schedule(sampler.every if sampler else None, begins=later is not None)
        self._versions = versions
        self._rescue = rescue
        # Bound once, since they are compared by identity.
        self._resuming, self._retrying = self._resume, self._retry
        self._runtime = runtime
        self._lock = forks.lock()
        self.run = self._installed(engine)
        self._incumbent = self.run if later else None
        self._reschedule()

    def _installed(self, engine: Engine) -> Compiled:
        """The callable of an engine, whose backwards are guarded and lacks counted from now on."""
        self._starved = 0
        run = _torch.breaks.undisabled(engine.compiled)
        if engine.backwards is not None:
            told = functools.partial(self._backward_failed, run)
            engine.backwards.serve(told, answers=self._may_answer(run))
        return run

    def _may_follow(self, run: Compiled) -> bool:
        """Whether something else can serve the graph if ``run`` raises."""
        return self._rescue is not None and run is not self._rescue.floor

    def _may_answer(self, run: Compiled) -> bool:
        """Whether a backward of ``run`` may be answered by the graph it was compiled from."""
        return self._may_follow(run) and not cast(Rescue, self._rescue).collective

    def _reschedule(self) -> None:
        """Put the next retry into the schedule; with the lock held."""
        self._schedule.retry(self._rescue.retry_at() if self._rescue else None)
        self._update_due()

    def _update_due(self) -> None:
        """Note the tick of the next special call; with the lock held."""
        self.due = 0 if self._barrier else self._schedule.next + self._runtime.reads

    def answer(
        self, error: BaseException, run: Compiled, args: tuple[Any, ...], before: object
    ) -> Any:
        """Answer a call by the floor, since the engine ``run`` raised ``error``.

        Args:
            error: What it raised.
            run: The engine's callable.
            args: Of the call.
            before: Versions of the tracked tensors before it; ``None`` where they are not known.

        Returns:
            The outputs; ``None`` where ``error`` is to go to the caller: the engine had written to
            its inputs, other ranks may take part in the call, or nothing is there to answer. It is
            raised where it was caught: a frame that has it as an argument and is in its traceback
            would keep all that the caller's frames hold until the garbage is collected.

        Raises:
            Exception: whatever the captured graph raises for these inputs.
        """
        rescue = self._rescue
        # These two have called an engine and answered for it already, or found none to call.
        if run is self._resuming or run is self._retrying:
            return None
        if isinstance(error, _torch.modes.StopRecomputation):  # a checkpoint has what it wants
            return None
        if rescue is None or run is rescue.floor:
            self._runtime.failed(error)
            return None
        if isinstance(error, SharedInputs):
            outputs = rescue.floor(*args)
            self._runtime.failed(error, answered=True)
            return outputs
        if why := rescue.once_only or self._written_to(args, before):
            error.add_note(f"composer: {why}, so nobody can answer")
            self._runtime.failed(error)
            self._hand_over(error, run)
            return None
        if lacks_memory(error):
            return self._with_more_memory(error, run, rescue, args)
        try:
            outputs = rescue.floor(*args)
        except _torch.modes.StopRecomputation:  # as above, of the floor
            self._answered(error, run)
            raise
        self._answered(error, run)
        return outputs

    def _written_to(self, args: tuple[Any, ...], before: object) -> str:
        """What is to be said of an engine that wrote to its inputs; empty where it did not."""
        if before is None:
            return UNSEEN
        return "" if self._versions.of(args) == before else WRITTEN

    def _answered(self, error: BaseException, run: Compiled) -> None:
        """The floor has answered for ``run``, which is given up."""
        self._runtime.failed(error, answered=True)
        self._hand_over(error, run)

    def special(self, number: int, run: Compiled) -> tuple[Compiled, Compiled]:
        """Who is to blame if this call raises, and the callable that makes it.

        Args:
            number: The tick of the call.
            run: What serves the graph.
        """
        if _is_recording():
            return run, run  # nothing may wait for the card meanwhile: what is due is done later
        barrier = self._barrier
        run, serve = self._plan_call(number, run)
        return run, serve if barrier is None else functools.partial(self._admit, barrier, serve)

    def _plan_call(self, number: int, run: Compiled) -> tuple[Compiled, Compiled]:
        """As :meth:`special`, without the barrier.

        If several threads call at once, the first of them makes the comparison, or the compile.
        """
        with self._lock:
            call, sampler = number - self._runtime.reads, self._sampler
            if self._schedule.lets_go(call):
                self._release_previous()
            kind = CallKind.PLAIN if run is self._resuming else self._schedule.kind_of(call)
            self._update_due()
        if kind is CallKind.BEGIN:
            return run, functools.partial(self._begin, run)
        if kind is CallKind.RETRY:
            return self._retrying, self._retrying
        if kind is CallKind.PLAIN or sampler is None or run is sampler.floor:
            return run, run
        return run, functools.partial(self._compare, sampler, run)

    @contextlib.contextmanager
    def _beside(self, answer: Compiled | None = None) -> Iterator[Compiled]:
        """Count the time of a context as no time of the call, but for that of ``answer``.

        That is to be called by the callable that this gives.
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

    def _admit(self, barrier: Barrier, serve: Compiled, *args: Any) -> Any:
        with self._beside(serve) as timed:
            return barrier.admit(timed, *args)

    def _begin(self, run: Compiled, *args: Any) -> Any:
        """Begin the background work, and answer the call by ``run``.

        The incumbent may have failed at the first call; its seat is then not wanted any more.
        """
        first = cast(Compiled, self._incumbent)
        seat = Seat(
            lambda: self.called_by() is not None and self.run is first,
            functools.partial(self._take_over, first),
            self._barred,
        )
        with self._beside():
            cast(Later, self._later).begin(args, first, seat)
        self._later = self._incumbent = None
        return self._looked_at(run)(*args)

    @contextlib.contextmanager
    def _barred(self) -> Iterator[Barrier]:
        """Have every call pass a barrier, for as long as the context lasts."""
        barrier = Barrier()
        try:
            self._set_barrier(barrier)
            yield barrier
        finally:
            self._set_barrier(None)

    def _set_barrier(self, barrier: Barrier | None) -> None:
        with self._lock:
            self._barrier = barrier
            self._update_due()

    def _take_over(self, run: Compiled, chosen: TakeOver) -> None:
        """Let another engine serve in place of ``run``, unless that has failed meanwhile.

        What it replaces is kept for :data:`_PROBATION` calls, where ``chosen`` says so.
        """
        with self._lock:
            served = self.run is run
            engine, keeps = chosen(served)
            if engine is None or not served:
                return
            self.run = self._installed(engine)
            if keeps and self._rescue is not None:
                self._previous = Engine(run)
                self._schedule.let_go(self._runtime.calls + _PROBATION)
            self._reschedule()

    def _release_previous(self) -> None:
        self._previous = None
        self._schedule.let_go(None)

    def _looked_at(self, run: Compiled) -> Compiled:
        """The callable of an engine at a call that is special already; compared if each call is."""
        sampler = self._sampler
        if sampler is None or sampler.every > 1 or run is sampler.floor:
            return run
        return functools.partial(self._compare, sampler, run)

    def _compare(self, sampler: Sampler, run: Compiled, *args: Any) -> Any:
        """Answer a call by ``run``, or by the floor where the numbers of ``run`` are wrong.

        Raises:
            Refusal: they are wrong, and the policy wants errors.
        """
        with self._beside(run) as timed:
            outputs, refusal = sampler.compare(timed, args)
        if refusal is None:
            return outputs
        if self._rescue is None:
            try:
                raise refusal
            finally:
                del refusal  # as in :meth:`answer`: its traceback holds this frame
        self._runtime.failed(refusal, answered=True)
        outputs = self._rescue.floor(*args)
        self._hand_over(refusal, run)
        return outputs

    def _with_more_memory(
        self, error: BaseException, run: Compiled, rescue: Rescue, args: tuple[Any, ...]
    ) -> Any:
        """Try the call again with caches emptied, then by the floor; the engine stays.

        One that lacks memory again and again is given up: emptying caches at every call takes time.
        """
        free_memory()
        before = self._versions.of(args)
        try:
            return verify.outputs_of(run(*args))
        except BaseException as again:
            interrupts.pass_on(again)
            if self._versions.of(args) != before:
                self._runtime.failed(again)
                raise
        outputs = rescue.floor(*args)
        self._runtime.failed(error, answered=True)
        self._lacked_memory(error, run)
        return outputs

    def _lacked_memory(self, error: BaseException, run: Compiled, what: str = "raised") -> None:
        """Count a call for which ``run`` lacked the memory, while it serves."""
        self._starved += self.run is run
        if self._starved >= _STARVED:
            self._hand_over(error, run, what)

    def _backward_failed(self, run: Compiled, error: BaseException, answered: bool) -> None:
        """Record an error in a backward of ``run``, and give ``run`` up.

        Args:
            run: The engine's callable.
            error: What its backward raised.
            answered: Whether torch has computed the gradients instead.
        """
        self._runtime.failed(error, answered=answered)
        if not self._may_follow(run):
            return
        what = "its backward raised"
        if answered and lacks_memory(error):
            self._lacked_memory(error, run, what)
        else:
            self._hand_over(error, run, what)

    def _hand_over(self, error: BaseException, run: Compiled, what: str = "raised") -> None:
        """Give ``run`` up, unless a failure in another thread has done so already.

        The engine that it had replaced serves again, if that is still kept; else the next call has
        the next candidate compiled. Sinks are told when that is settled.
        """
        rescue = cast(Rescue, self._rescue)
        with self._lock:
            if self.run is run:
                self.run = self._resuming
                rescue.blame(error, what)
                if self._previous is not None:
                    self.run = self._installed(self._previous)
                    self._release_previous()
                    rescue.reverted()
                    self._reschedule()
        rescue.publish()

    def _resume(self, *args: Any) -> Any:
        """The first call after a failure: have the next candidate compiled, and call it."""
        rescue = cast(Rescue, self._rescue)
        # Dynamo's lock first: a compile in another thread may call this very graph.
        with _torch.compiles.compiling(), self._lock:
            if self.run is self._resuming:
                self.run = self._installed(self._compile(rescue.successor, args))
                self._reschedule()
            run = self.run
        rescue.publish()
        return self._run_guarded(run, args)

    def _retry(self, *args: Any) -> Any:
        """A call before which an engine in quarantine is compiled again."""
        rescue = cast(Rescue, self._rescue)
        with _torch.compiles.compiling(), self._lock:
            if self.run is not self._resuming:  # else an engine failed meanwhile; that comes first
                engine = self._compile(rescue.retry, args)
                if engine is not None:
                    self.run = self._installed(engine)
                self._reschedule()
            run = self.run
        rescue.publish()
        return self._run_guarded(run, args)

    def _compile(self, make: Callable[[Sequence[Any]], T], args: tuple[Any, ...]) -> T:
        """What ``make`` compiles for these inputs; its error is recorded on the way out."""
        try:
            with self._beside():
                return make(args)
        except BaseException as error:
            interrupts.pass_on(error)
            self._runtime.failed(error)
            raise

    def _run_guarded(self, run: Compiled, args: tuple[Any, ...]) -> Any:
        """Answer a call by an engine that has just come."""
        before = self._versions.of(args)
        try:
            return verify.outputs_of(self._looked_at(run)(*args))
        except BaseException as error:
            interrupts.pass_on(error)
            outputs = self.answer(error, run, args, before)
            if outputs is None:
                raise
            return outputs
