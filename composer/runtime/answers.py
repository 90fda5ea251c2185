"""How the calls of a graph are answered that are not ordinary, or at which the engine fails.

An engine that raises costs its user nothing but time: its inputs are still what they were, so the
captured graph answers that call, and the next candidate is compiled for the calls that follow.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch

from composer import _torch
from composer.chain import verify
from composer.errors import SharedInputs
from composer.records import Runtime
from composer.runtime.sampling import Sampler
from composer.runtime.schedule import CallKind, Schedule
from composer.runtime.slot import TABLE, Answer, Built, Chain, Compiled, Engine, Event, Slot
from composer.runtime.versions import UNSEEN, WRITTEN, Versions
from composer.system import control_flow
from composer.system.barrier import Barrier
from composer.system.memory import free_memory, lacks_memory

Later = Callable[[Sequence[Any], Compiled, Slot], None]
"""Begins background work, given the inputs of the second call of a graph, and what serves it.

The call is made when this returns.
"""


def _is_recording() -> bool:
    """Whether the program records a CUDA graph of its own by the calls that it makes now."""
    began = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return began and torch.cuda.is_current_stream_capturing()


class Answers:
    """The calls of one graph, for its engine slot.

    Args:
        built: The engine that serves first.
        chain: The graph's candidates and its record.
        runtime: Where calls are counted.
        versions: Tell whether an engine wrote to its inputs.
        sampler: Compares every N-th call with eager; ``None`` where the policy does not ask for it.
        later: Background work that begins with the second call (``select`` with ``background``).

    Attributes:
        slot: The graph's engine slot.
        aside: Seconds that calls spent so far on anything but their answer.
    """

    def __init__(
        self,
        built: Built,
        chain: Chain,
        runtime: Runtime,
        versions: Versions,
        sampler: Sampler | None = None,
        later: Later | None = None,
    ) -> None:
        self.aside = 0.0
        self.versions = versions
        self._chain, self._runtime = chain, runtime
        self._sampler, self._later = sampler, later
        self._retrying = self._retry  # bound once, since it is compared by identity
        schedule = Schedule(sampler.every if sampler else None, begins=later is not None)
        self.slot = Slot(built, self, chain, runtime, schedule)
        self._first = self.slot.run if later else None

    def install(self, engine: Engine) -> Compiled:
        """The callable of an engine, whose backwards are reported from now on."""
        run = _torch.breaks.undisabled(engine.compiled)
        if engine.backwards is not None:
            told = functools.partial(self._backward_failed, run)
            may_answer = self._chain.recovers and not self._chain.collective
            engine.backwards.serve(told, answers=may_answer)
        return run

    def resume(self, *args: Any) -> Any:
        """The first call after a failure: have the next candidate compiled, and call it."""
        return self._answer_by(self.slot.advance, args)

    def _retry(self, *args: Any) -> Any:
        """A call before which an engine in quarantine is compiled again."""
        return self._answer_by(self.slot.retry, args)

    def answer(
        self, error: BaseException, run: Compiled, args: tuple[Any, ...], before: object
    ) -> Any:
        """Answer a call at which the engine ``run`` raised ``error``, as the slot's table says.

        Before the call, tensors had the versions ``before``; ``None`` where they are not known.

        Returns:
            The outputs; ``None`` where ``error`` is to go to the caller: the engine had written to
            its inputs, other ranks may take part in the call, or nothing is there to answer. It is
            raised where it was caught: a frame that has it as an argument and is in its traceback
            would keep all that the caller's frames hold until the garbage is collected.

        Raises:
            Exception: whatever the captured graph raises for these inputs.
        """
        fallback = self._chain.fallback
        # These two have called an engine and answered for it already, or found none to call.
        if run is self.slot.resuming or run is self._retrying:
            return None
        if isinstance(error, _torch.modes.StopRecomputation):  # a checkpoint has what it wants
            return None
        if not self.slot.follows(run):
            self._runtime.failed(error)
            return None
        if isinstance(error, SharedInputs):
            outputs = fallback(*args)
            self._runtime.failed(error, answered=True)
            return outputs
        why = self._once_only(args, before)
        event = Event.WROTE if why else Event.LACKED if lacks_memory(error) else Event.RAISED
        answer = TABLE[event].answer
        if answer is Answer.NOBODY:
            error.add_note(f"composer: {why}, so nobody can answer")
            self._failed(event, error, run, answered=False)
            return None
        if answer is Answer.AGAIN:
            return self._again(error, run, args)
        try:
            outputs = fallback(*args)
        except _torch.modes.StopRecomputation:  # of the eager fallback, as of an engine
            self._failed(event, error, run)
            raise
        self._failed(event, error, run)
        return outputs

    def special(self, number: int, run: Compiled) -> tuple[Compiled, Compiled]:
        """Who is to blame if the call with this tick raises, and the callable that makes it."""
        if _is_recording():
            return run, run  # nothing may wait for the card meanwhile: what is due is done later
        barrier = self.slot.barrier
        run, serve = self._plan_call(number, run)
        return run, serve if barrier is None else functools.partial(self._admit, barrier, serve)

    def _plan_call(self, number: int, run: Compiled) -> tuple[Compiled, Compiled]:
        """As :meth:`special`, without the barrier.

        If several threads call at once, the first of them makes the comparison, or the compile.
        """
        kind = self.slot.kind_of(number, run)
        if kind is CallKind.BEGIN:
            return run, functools.partial(self._begin, run)
        if kind is CallKind.RETRY:
            return self._retrying, self._retrying
        return run, run if kind is CallKind.PLAIN else self._compared(run)

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

        The first engine may have failed at the first call; the work finds that out.
        """
        with self._beside():
            cast(Later, self._later)(args, cast(Compiled, self._first), self.slot)
        self._later = self._first = None
        return self._looked_at(run)(*args)

    def _looked_at(self, run: Compiled) -> Compiled:
        """The callable of an engine at a call that is special already; compared if each call is."""
        sampler = self._sampler
        return self._compared(run) if sampler and sampler.every == 1 else run

    def _compared(self, run: Compiled) -> Compiled:
        sampler = self._sampler
        if sampler is None or run is sampler.fallback:
            return run
        return functools.partial(self._compare, sampler, run)

    def _compare(self, sampler: Sampler, run: Compiled, *args: Any) -> Any:
        """Answer a call by ``run``, or by eager where the numbers of ``run`` are wrong.

        Raises:
            Refusal: they are wrong, and the policy wants errors.
        """
        engine = self.slot.engine
        with self._beside(run) as timed:
            bounds = engine.bounds if engine else sampler.bounds
            outputs, refusal = sampler.compare(timed, args, bounds)
        if refusal is None:
            return outputs
        if not self._chain.recovers:
            try:
                raise refusal
            finally:
                del refusal  # as in :meth:`answer`: its traceback holds this frame
        outputs = self._chain.fallback(*args)
        self._failed(Event.WRONG, refusal, run)
        return outputs

    def _once_only(self, args: tuple[Any, ...], before: object) -> str:
        """Why a call that an engine has begun cannot be answered by another; empty if it can."""
        if self._chain.collective:
            return "the engine may have begun what other ranks wait for"
        if before is None:
            return UNSEEN
        return "" if self.versions.of(args) == before else WRITTEN

    def _failed(
        self,
        event: Event,
        error: BaseException,
        run: Compiled,
        what: str = "raised",
        *,
        answered: bool = True,
    ) -> None:
        """Count an error of ``run``, and have the slot follow; then tell sinks."""
        self._runtime.failed(error, answered=answered)
        self.slot.fail(event, run, error, what)
        self._chain.publish()

    def _again(self, error: BaseException, run: Compiled, args: tuple[Any, ...]) -> Any:
        """Try the call again with caches emptied, then by the eager fallback; the engine stays.

        One that lacks memory again and again is given up: emptying caches at every call takes time.
        """
        free_memory()
        before = self.versions.of(args)
        try:
            return verify.outputs_of(run(*args))
        except BaseException as again:
            control_flow.pass_on(again)
            if self.versions.of(args) != before:
                self._runtime.failed(again)
                raise
        outputs = self._chain.fallback(*args)
        self._failed(Event.LACKED, error, run)
        return outputs

    def _backward_failed(self, run: Compiled, error: BaseException, answered: bool) -> None:
        """Follow an error in a backward of ``run``, whether torch has ``answered`` it or not."""
        event = Event.LACKED if answered and lacks_memory(error) else Event.BACKWARD
        self._failed(event, error, run, "its backward raised", answered=answered)

    def _answer_by(self, change: Callable[[Sequence[Any]], Compiled], args: tuple[Any, ...]) -> Any:
        """Answer a call by the engine that ``change`` compiles for it.

        An error of the compile is recorded on the way out.
        """
        try:
            with self._beside():
                run = change(args)
        except BaseException as error:
            control_flow.pass_on(error)
            self._runtime.failed(error)
            raise
        self._chain.publish()
        before = self.versions.of(args)
        try:
            return verify.outputs_of(self._looked_at(run)(*args))
        except BaseException as error:
            control_flow.pass_on(error)
            outputs = self.answer(error, run, args, before)
            if outputs is None:
                raise
            return outputs
