"""Answers the calls of a graph that are special, or at which the engine fails.

An engine that raises costs the user only time. If the inputs are unchanged, the captured graph
answers that call, and the next candidate is compiled for the following calls.
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
from composer.runtime.slot import TABLE, Answer, Built, Chain, Compiled, Engine, Event, Slot
from composer.runtime.special_calls import CallKind, Schedule
from composer.runtime.versions import UNSEEN, WRITTEN, Versions
from composer.system import control_flow
from composer.system.barrier import Barrier
from composer.system.memory import free_memory, lacks_memory

Later = Callable[[Sequence[Any], Compiled, Slot], None]
"""Begins background work at a graph's second call, given its inputs, the engine and the slot.

The call itself is made after this returns.
"""


def _is_recording() -> bool:
    """Return True if the program is recording a CUDA graph of its own."""
    began = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return began and torch.cuda.is_current_stream_capturing()


class Answers:
    """Makes and answers the calls of one graph (:class:`composer.runtime.slot.Calls`).

    Args:
        built: The engine that serves first.
        chain: The graph's candidates and its record.
        runtime: Counts the calls.
        versions: Detects whether an engine wrote to its inputs.
        sampler: Compares every N-th call with eager; ``None`` if the policy does not ask for it.
        later: Background work that begins with the second call (``select`` with ``background``).

    Attributes:
        slot: The graph's engine slot.
        aside: Total seconds that calls have spent on anything other than their answer.
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
        """Return the callable of an engine, and have its backwards reported from now on."""
        run = _torch.breaks.undisabled(engine.compiled)
        if engine.backwards is not None:
            report = functools.partial(self._backward_failed, run)
            recovers = self._chain.recovers and not self._chain.collective
            engine.backwards.serve(report, recovers=recovers)
        return run

    def resume(self, *args: Any) -> Any:
        """Answer the first call after a failure: compile the next candidate, and call it."""
        return self._answer_by(self.slot.advance, args)

    def _retry(self, *args: Any) -> Any:
        """Answer a call before which an engine in quarantine is compiled again."""
        return self._answer_by(self.slot.retry, args)

    def answer(
        self, error: BaseException, run: Compiled, args: tuple[Any, ...], before: object
    ) -> Any:
        """Answer a call at which an engine failed, as the slot's table says.

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
        # These two have answered for an engine's failure already, or had no engine to call.
        if run is self.slot.resuming or run is self._retrying:
            return None
        if isinstance(error, _torch.modes.StopRecomputation):  # not a failure: a checkpoint is done
            return None
        if not self.slot.follows(run):
            self._runtime.failed(error)
            return None
        if isinstance(error, SharedInputs):
            outputs = self._chain.fallback(*args)
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
        """Answer as the slot's table says; a call is repeated only if ``may_repeat`` is true."""
        fallback = self._chain.fallback
        why = self._once_only(args, before)
        event = Event.WROTE if why else Event.LACKED if lacks_memory(error) else Event.RAISED
        answer = TABLE[event].answer
        if answer is Answer.NOBODY:
            error.add_note(f"composer: {why}, so nobody can answer")
            self._failed(event, error, run, answered=False)
            return None
        if answer is Answer.AGAIN and may_repeat:
            return self._again(error, run, args)
        try:
            outputs = fallback(*args)
        except _torch.modes.StopRecomputation:  # not a failure of the eager fallback either
            self._failed(event, error, run)
            raise
        self._failed(event, error, run)
        return outputs

    def special(self, number: int, run: Compiled) -> tuple[Compiled, Compiled]:
        """Return the callable to blame if the call with this tick raises, and the one to call."""
        if _is_recording():
            return run, run  # nothing may synchronize with the GPU now: special work is done later
        barrier = self.slot.barrier
        run, serve = self._plan_call(number, run)
        return run, serve if barrier is None else functools.partial(self._admit, barrier, serve)

    def _plan_call(self, number: int, run: Compiled) -> tuple[Compiled, Compiled]:
        """Do the same as :meth:`special`, without the barrier.

        If several threads call at once, only the first makes the comparison or the compile.
        """
        kind = self.slot.kind_of(number, run)
        if kind is CallKind.BEGIN:
            return run, functools.partial(self._begin, run)
        if kind is CallKind.RETRY:
            return self._retrying, self._retrying
        return run, run if kind is CallKind.PLAIN else self._compared(run)

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

    def _admit(self, barrier: Barrier, serve: Compiled, *args: Any) -> Any:
        with self._beside(serve) as timed:
            return barrier.admit(timed, *args)

    def _begin(self, run: Compiled, *args: Any) -> Any:
        """Begin the background work, and answer the call by ``run``.

        The first engine may have failed at the first call. The background work checks that itself.
        """
        with self._beside():
            cast(Later, self._later)(args, cast(Compiled, self._first), self.slot)
        self._later = self._first = None
        return self._looked_at(run)(*args)

    def _looked_at(self, run: Compiled) -> Compiled:
        """Return the callable for a special call; it is compared too if every call is compared."""
        sampler = self._sampler
        return self._compared(run) if sampler and sampler.every == 1 else run

    def _compared(self, run: Compiled) -> Compiled:
        sampler = self._sampler
        if sampler is None or run is sampler.fallback:
            return run
        return functools.partial(self._compare, sampler, run)

    def _compare(self, sampler: Sampler, run: Compiled, *args: Any) -> Any:
        """Answer a call by ``run``, or by eager if the numbers of ``run`` are wrong.

        Raises:
            Refusal: the numbers are wrong, and the policy wants errors.
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
                del refusal  # its traceback holds this frame, which would be a cycle
        outputs = self._chain.fallback(*args)
        self._failed(Event.WRONG, refusal, run)
        return outputs

    def _once_only(self, args: tuple[Any, ...], before: object) -> str:
        """Return why a call that an engine has begun cannot be repeated; empty if it can."""
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
        """Count an error of ``run``, make the slot's transition, and tell the sinks."""
        self._runtime.failed(error, answered=answered)
        self.slot.fail(event, run, error, what)
        self._chain.publish()

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

    def _backward_failed(self, run: Compiled, error: BaseException, answered: bool) -> None:
        """Handle an error in a backward of ``run``; ``answered`` is True if torch has answered."""
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
