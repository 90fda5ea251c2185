"""Selection in the background: the first accepted engine serves while the others are built.

This begins with a graph's second call. A graph that is called once needs no faster engine. When a
program calls a graph again, it has usually compiled all graphs that it needs to go on. The inputs
of the second call are copied, and the call is answered as usual.

A background thread works on these copies and on the program's own weights. The program only notices
that the thread takes cores, memory and interpreter time:

- Candidates are built one at a time under the lock of Dynamo's compiles, and the lock is free for a
  while between two builds. So a compile of the program waits for one build at most.
- A graph that writes, draws random numbers, trains or meets other ranks keeps its first engine,
  because additional calls of it would have side effects.
- The program may draw random numbers, write to weights and compile meanwhile. So no state is
  restored, unlike in a benchmark that the program waits for.
- The engines and the eager fallback are timed in rounds as in any benchmark, each sample between
  two calls of the graph. A call may have to wait for one sample (:mod:`composer.system.barrier`).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from composer import _torch, session
from composer.chain import ranks, select
from composer.chain.candidates import ChainEntry
from composer.chain.select import choice, remembered
from composer.errors import error_line
from composer.graphs import clones, writes
from composer.knowledge.fingerprint import Fingerprint
from composer.policy.resolution import Resolved
from composer.records import (
    EAGER,
    Attempt,
    GraphRequest,
    Outcome,
    Reason,
    Status,
)
from composer.runtime.answers import Later
from composer.runtime.slot import Compiled, Slot
from composer.runtime.succession import Succession
from composer.system import control_flow
from composer.system.background import in_this_context
from composer.system.memory import free_memory

_PENDING = "in the background, from the second call on"

_UNWANTED = "the graph was dropped, or its engine failed, before all were measured"

_PAUSE = 0.05
"""Seconds between two builds, in which a waiting compile of the program can take the lock."""

_OWN_GRAPHS = ("reduce-overhead", "max-autotune")
"""Modes in which Inductor records CUDA graphs, each for the thread that records."""


@dataclass(frozen=True, slots=True)
class BackgroundSelection:
    """The benchmark that a policy asks for in the background.

    Attributes:
        benchmark: The benchmark.
        obstacle: Why it cannot be run; empty if it can.
    """

    benchmark: select.Benchmark
    obstacle: str

    @staticmethod
    def of(request: GraphRequest, resolved: Resolved) -> BackgroundSelection | None:
        """Return the selection for a graph; ``None`` if everything is built before the first call.

        This is also the case if the fastest engine is remembered already.
        """
        policy = resolved.policy
        benchmark = select.Benchmark.of(policy, resolved.cache)
        if benchmark is None or policy.strict or not policy.select.background:
            return None
        whole = remembered.fingerprint_of(request, resolved.entries)
        if remembered.recall(whole, benchmark).fact is not None:
            return None
        among_ranks = ranks.are_asked(resolved.distributed.timeout)
        obstacle = select.obstacle(request, among_ranks=among_ranks) or _obstacle(request)
        return BackgroundSelection(benchmark, obstacle)

    def announced(self, outcome: Outcome) -> Outcome:
        """Return the compile's outcome with a note in the accepted attempt that timing follows."""
        told = f"no: {self.obstacle}" if self.obstacle else _PENDING
        if outcome.chosen == EAGER:
            return outcome
        ends = (
            end._replace(attempt=end.attempt.timed(told)) if end.attempt.accepted else end
            for end in outcome.ends
        )
        return dataclasses.replace(outcome, ends=tuple(ends))

    def behind(self, successors: Succession) -> Later | None:
        """Return the work that begins with the graph's second call; ``None`` if there is none.

        Args:
            successors: The rest of the graph's chain.
        """
        if self.obstacle or successors.report.chosen == EAGER:
            return None
        *refused, serving = successors.report.attempts
        attempts = (*refused, serving.timed(None))

        def begin(args: Sequence[Any], run: Compiled, slot: Slot) -> None:
            """Copy the inputs of the call that is about to be made, and start the thread's task."""
            request, home = successors.request, session.current()
            try:
                copies = clones.copy_inputs(args, keep=request.weights)
                whole = remembered.fingerprint_of(request, successors.entries)
                task = _Task(
                    successors,
                    self.benchmark,
                    attempts,
                    slot,
                    run,
                    home,
                    copies,
                    _settings(),
                    whole,
                )
                home.background.submit(in_this_context(task, request.device))
            except BaseException as error:  # noqa: BLE001  # recorded: the call is made all the same
                _tell(successors, slot, error_line(error))
                control_flow.pass_on(error)

        return begin


def _obstacle(request: GraphRequest) -> str:
    """Return why a graph cannot be called additionally while the program runs; empty if it can."""
    if request.training:
        return "a training graph is not run beside the program"
    if writes.may_write(request.gm):
        return "the graph writes to its inputs or buffers, and is not run beside the program"
    if not writes.is_known(request.gm):
        what = "it is not known what all of the graph's operators write to or draw"
        return f"{what}, and it is not run beside the program"
    if request.device.startswith("cuda") and request.mode in _OWN_GRAPHS:
        return "CUDA graphs belong to the thread that records them"
    return ""


def _tell(successors: Succession, slot: Slot, why: str) -> None:
    """Record why there is no result of the benchmark."""
    with slot.lock:
        successors.tell(f"no: {why}")
    successors.publish()


class _Dropped(Exception):
    """Raised to abandon the benchmark; the text is the reason."""


@dataclass
class _Task:
    """The work of the background thread for one graph.

    Attributes:
        successors: The graph's chain and record.
        benchmark: The benchmark to run.
        attempts: The attempts of the compile; the last one is the engine that serves.
        slot: The graph's engine slot.
        run: The callable of the engine that serves.
        home: The session in which the graph was compiled.
        inputs: Copies of the second call's inputs.
        settings: torch's settings at that call.
        whole: The fingerprint of the graph and its whole chain at that call.
        undecided: Candidates that could not be verified because the program wrote to weights. They
            may be verified the next time, so the verdict is not kept if there are any.
        made: Results that the engines share.
    """

    successors: Succession
    benchmark: select.Benchmark
    attempts: tuple[Attempt, ...]
    slot: Slot
    run: Compiled
    home: session.Session
    inputs: list[Any]
    settings: tuple[Any, ...]
    whole: Fingerprint
    undecided: list[str] = dataclasses.field(default_factory=list)
    made: dict[str, object] = dataclasses.field(default_factory=dict)

    def __call__(self) -> None:
        self._measure()
        free_memory()

    def _measure(self) -> None:
        successors = self.successors
        try:
            self._check()
            request = successors.request_for(self.inputs)
            outcome = self._race(request)
            self._check()
            self._choose(outcome)
            successors.publish()
            if not self.undecided:
                remembered.keep(self.whole, self.benchmark, outcome)
        except _Dropped as dropped:
            self._tell(str(dropped))
        except control_flow.ProcessEnds:
            raise
        # SystemExit would only end this thread, unnoticed by the program: record it instead.
        except BaseException as error:  # noqa: BLE001  # recorded
            self._tell(error_line(error))

    def _tell(self, why: str) -> None:
        if session.current() is self.home:
            _tell(self.successors, self.slot, why)

    def _check(self) -> None:
        """Check that the result can still be used.

        Raises:
            _Dropped: it cannot; the text is the reason.
        """
        if session.current() is not self.home:
            raise _Dropped("composer.reset() was called")
        if not self.slot.is_wanted(self.run):
            raise _Dropped(_UNWANTED)
        if _settings() != self.settings:
            raise _Dropped("torch's default dtype, or another setting of its, was changed")

    def _choose(self, outcome: Outcome) -> None:
        with self.slot.lock:
            if not self.slot.is_wanted(self.run):
                raise _Dropped(_UNWANTED)
            built, may_return = self.successors.selected(outcome, len(self.attempts) - 1)
            self.slot.take_over(built, keeps=may_return)

    def _race(self, request: GraphRequest) -> Outcome:
        inputs = self.inputs
        with _torch.compiles.recaptured(request.gm, inputs):
            if _torch.randomness.draws_random_numbers(request.gm.forward, inputs):
                raise _Dropped("the graph draws random numbers, which the program would miss")
        refused = [choice.Tried(each, None) for each in self.attempts[:-1]]
        serving = choice.Tried(self.attempts[-1], self.run)
        with self.slot.barred() as barrier:
            return choice.fastest(
                [*refused, serving, *self._others()],
                self._fallback,
                dataclasses.replace(request, example_inputs=tuple(inputs), alongside=True),
                dataclasses.replace(self.benchmark, barrier=barrier),
            )

    def _others(self) -> Iterator[choice.Tried]:
        """Yield the rest of the chain, tried as :mod:`composer.chain.walk` does."""
        for entry in self.successors.entries[len(self.attempts) :]:
            time.sleep(_PAUSE)
            self._check()
            tried = self._try(entry)
            yield tried
            if tried.is_fallback and tried.attempt.accepted:
                return

    def _fallback(self) -> choice.Tried:
        with _torch.compiles.compiling(), _torch.randomness.frozen_generators():
            self.successors.eager.made_for(self.inputs, alongside=True)
        return choice.fallback_of(self.successors.fallback, self.successors.eager.passes)

    def _try(self, entry: ChainEntry) -> choice.Tried:
        before = self._states()
        with _torch.compiles.compiling(), _torch.randomness.frozen_generators():
            outcome, _ = self.successors.walk(self.inputs, (entry,), alongside=True, made=self.made)
        ((attempt, error),) = outcome.ends
        is_fallback = entry.backend.may_return_original
        if attempt.accepted:
            return choice.Tried(
                attempt, outcome.compiled, None, outcome.passes, is_fallback, outcome.bounds
            )
        if attempt.status is Status.REJECTED and self._states() != before:
            self.undecided.append(attempt.who)
            what = f"the program wrote to weights while it was compared: {attempt.message}"
            attempt = dataclasses.replace(
                attempt, status=Status.SKIPPED, reason=Reason.POLICY, message=what
            )
        return choice.Tried(attempt, None, error, (), is_fallback)

    def _states(self) -> list[tuple[object, ...]]:
        """Return a state of each weight; if two such lists differ, the program wrote to weights."""
        request = self.successors.request
        passed = (self.inputs[place] for place in sorted(request.weights))
        weights = (*passed, *request.gm.parameters(), *request.gm.buffers())
        return [clones.state_of(each) for each in weights]


def _settings() -> tuple[Any, ...]:
    """Return the settings of torch that hold for all threads and affect what a graph computes."""
    return (
        torch.get_default_dtype(),
        _torch.modes.float32_precision(),
        torch.are_deterministic_algorithms_enabled(),
    )
