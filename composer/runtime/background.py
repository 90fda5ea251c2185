"""Selection in the background: eager answers until an engine is chosen in a sandbox.

The captured graph answers from the first call on, and nothing is built in the program. The work
begins with the graph's second call: a graph that is called once needs no engine, and a program that
calls a graph again has usually compiled all graphs that it needs to go on. The inputs of that call
are copied and sent to a sandbox with the graph and its weights. It builds, verifies and measures
the candidates (:mod:`composer.chain.sandbox.decide`), and leaves artefacts and a verdict. A thread
of the program waits for it; it copies, and computes nothing.

Then one call of the program loads the winner alone, from its artefacts, as after a failure of an
engine. That call waits, and no other does.

A choice that was measured beside other load is provisional. It serves, and a :class:`Lull` looks at
some calls if the load is gone. Then a sandbox measures all candidates anew, in the same way.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from composer import session
from composer.chain import ranks, sandbox, select
from composer.chain.candidates import ChainEntry
from composer.chain.select import choice, remembered
from composer.chain.select.decision import Decision
from composer.graphs import clones, writes
from composer.passes.resolve import SharedPasses
from composer.policy.resolution import Resolved
from composer.records import (
    EAGER,
    Attempt,
    End,
    GraphRequest,
    Outcome,
    Reason,
    Runtime,
    Status,
)
from composer.system import hardware
from composer.system.subprocesses import Unwanted

_log = logging.getLogger("composer")

_PENDING = "it is to be built in a child process, from the second call of the graph on"

_NO_TIMES_YET = "in the background, from the second call on"

_WAITING = "waiting for a child process"

Tell = Callable[[Decision | sandbox.Undecided], None]

_SECONDS = 10.0
"""For how long there must be no load, the first time."""


def measures_anew(resolved: Resolved) -> bool:
    """Return True if a sandbox measures a graph's candidates anew where they met a load.

    Engines for ranges of sizes are measured anew by the next process alone.
    """
    benchmark = select.Benchmark.of(resolved.policy, resolved.cache)
    stays_here = any(each.stays_here for each in resolved.entries)
    return benchmark is not None and benchmark.renews and not stays_here


class Lull:
    """Looks if a provisional choice may be made anew: no load is left, and CPU time for it.

    It looks at the calls of the program, for want of a thread of its own. The time without a load
    doubles each time, so that a graph which always meets one is measured less and less often.

    Attributes:
        calls: After how many calls to look the next time.
    """

    def __init__(self) -> None:
        self.calls = 1
        self._seconds = _SECONDS
        self._begin()

    def _begin(self) -> None:
        self._began = time.perf_counter()
        self._waits = hardware.Waits.from_now()

    def has_come(self) -> bool:
        """Return True if the candidates may be measured now, and set CPU time aside for that."""
        if time.perf_counter() - self._began < self._seconds:
            self.calls *= 2
            return False
        is_loaded = self._waits.beside_load()
        self._begin()
        if is_loaded or not session.current().background.allowance.take():
            return False
        self._seconds *= 2
        return True


def is_asked(request: GraphRequest, resolved: Resolved) -> bool:
    """Return True if eager is to answer until an engine is chosen in the background.

    That is not so where the fastest engine is remembered: it is loaded at once.
    """
    policy = resolved.policy
    if policy.strict or not policy.select.background or writes.computes_nothing(request.gm):
        return False
    if all(each.is_fallback for each in resolved.entries):
        return False
    if select.obstacle(request, among_ranks=ranks.are_asked(resolved.distributed.timeout)):
        return False
    benchmark = select.Benchmark.of(policy, resolved.cache)
    if benchmark is None:
        return True
    whole = remembered.fingerprint_of(request, resolved.entries)
    return remembered.recall(whole, benchmark).fact is None


def pending(entries: Sequence[ChainEntry], fallback: choice.Tried) -> Outcome:
    """Return the outcome of a compile that leaves the choice to the background."""
    assert fallback.compiled is not None
    names = [each.candidate.name for each in entries]
    attempts = (Attempt(each, Status.SKIPPED, Reason.POLICY, _PENDING, 0.0) for each in names)
    ends = tuple(End(each.timed(_NO_TIMES_YET), None) for each in attempts)
    return Outcome(ends, EAGER, fallback.compiled, fallback.passes)


def begin(
    request: GraphRequest,
    chain: tuple[Sequence[ChainEntry], SharedPasses, select.Benchmark | None],
    args: Sequence[Any],
    is_wanted: Callable[[], bool],
    tell: Tell,
    runtime: Runtime,
) -> None:
    """Begin the selection for a graph with the inputs of a call.

    Args:
        request: The graph, without tensors.
        chain: The candidates, the passes of the later stages, and how to find the fastest.
        args: The inputs, of which copies are made now.
        is_wanted: Asked in the background, from time to time, if the graph may still be called.
        tell: Called in the background with the decision, or why there is none.
        runtime: The counters of the graph, which say what is under way.
    """
    home = session.current()
    copies = clones.copy_inputs(args, keep=request.weights)
    called = dataclasses.replace(request, example_inputs=tuple(copies))
    around = sandbox.surroundings()

    def goes_on() -> bool:
        return not home.background.is_ending and session.current() is home and is_wanted()

    def show(what: str) -> None:
        runtime.under_way = what
        _log.info("in the background, graph %d (%s): %s", request.number, request.model, what)

    def work() -> None:
        if goes_on():
            with contextlib.suppress(Unwanted):
                tell(sandbox.decide(called, *chain, beside=around, is_wanted=goes_on, show=show))
        # At the end of the process it stays, so that the last record says what was not finished.
        if not home.background.is_ending:
            runtime.under_way = ""

    show(_WAITING)
    home.background.submit(work)
