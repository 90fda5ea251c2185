"""``select`` with ``ranges``: an engine for each of a few ranges of sizes.

A graph with dynamic sizes serves calls of all sizes, and which engine is the fastest may depend on
the size (:mod:`composer.graphs.sizes`). The first choice is made as for any graph. A further choice
is made at the second call of a size that is far from all sizes that were measured: at that call, or
in the background. If another engine wins there, it serves the sizes around, and the first goes on
with its own. If the same one wins, its range is wider.

Each engine has a :class:`~composer.runtime.served.ServedGraph` of its own, with its own state,
quarantine and backwards. This module decides which of them a call goes to. What is measured for one
is a :class:`~composer.chain.select.decision.Decision`; the engine is built at the first call that
needs it, as after a choice in the background.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from composer.chain.sandbox import Undecided
from composer.chain.select.decision import Decision
from composer.graphs import sizes
from composer.records import Runtime
from composer.runtime import calls
from composer.runtime.served import Compiled, ServedGraph, is_recording
from composer.runtime.successors import Successors
from composer.system import control_flow, forks

_FAR = 4
"""A size is measured if it differs by this factor from all sizes that were measured."""

_FAR_BETWEEN = 2
"""The same, between two measured sizes at which different engines are the fastest."""

_SEEN = 2
"""A choice is made at this many calls of about the same size."""

_KEPT = 1024
"""Of how many sizes it is kept who serves them."""


def around(
    served: ServedGraph, successors: Successors, *, is_pending: bool
) -> tuple[Compiled, Callable[[], None]]:
    """Return the code around each call of a graph, and what notes that the program has dropped it.

    Args:
        served: The graph.
        successors: Its candidates.
        is_pending: True if the first choice is still to be made, in the background.
    """
    call = calls.around(served, successors.runtime)
    benchmark = successors.benchmark
    if benchmark is None or benchmark.ranges == 1:
        return call, served.free
    found = sizes.positions(successors.request.gm)
    was_measured = Decision(successors.record.report.attempts, ()).size is not None
    if not found or not (was_measured or is_pending):
        return call, served.free
    ranges = Ranges(served, successors, call, benchmark.ranges)
    return ranges.call_by(sizes.reader(found)), ranges.free


class _Server(NamedTuple):
    """One of the engines: its served graph, its record, and the code around its calls."""

    graph: ServedGraph
    successors: Successors
    call: Compiled


class Ranges:
    """The engines of one graph, and the sizes of calls that each of them serves.

    A place is that of a candidate in the chain, and ``None`` for eager. Changes are made with the
    lock held, but not what takes long: other calls go to the engines that there are.

    Args:
        first: The graph, served by the engine that was chosen first.
        successors: Its candidates.
        call: The code around the calls of ``first``.
        most: How many engines there may be.
    """

    def __init__(
        self, first: ServedGraph, successors: Successors, call: Compiled, most: int
    ) -> None:
        self._first = _Server(first, successors, call)
        self._successors = successors
        self._most = most
        self._runtime: Runtime = successors.runtime
        self._lock = forks.lock()
        self._servers: dict[int | None, _Server] = {}
        self._to_load: dict[int | None, Decision] = {}
        self._winners: dict[int, int | None] = {}
        self._starts: list[tuple[int, int | None]] = [(0, None)]
        self._asked: set[int] = set()
        self._seen: Counter[int] = Counter()
        self._decided: list[Decision] = []
        self._is_learnt = False
        self._settled: dict[int, Compiled] = {}

    def call_by(self, size_of: Callable[[Sequence[Any]], int]) -> Compiled:
        """Return the function that makes a call by the engine for its size."""
        settled = self._settled.get
        at = self._at

        def call(*args: Any) -> Any:
            size = size_of(args)
            run = settled(size)
            return (at(size, args) if run is None else run)(*args)

        return call

    def free(self) -> None:
        """Note that the program has dropped the graph."""
        for server in (self._first, *self._servers.values()):
            server.graph.free()

    def _at(self, size: int, args: Sequence[Any]) -> Compiled:
        """Return what makes a call of a size that is not settled; choose and build before, if due.

        If a choice or a build fails, the call is made by an engine that is there.
        """
        if is_recording():
            return self._server(size).call
        try:
            self._learn()
            if self._is_due(size):
                self._choose(size, args)
            self._follow()
            self._load(size, args)
        except BaseException as error:  # noqa: BLE001  # recorded: the call is made all the same
            control_flow.pass_on(error)
            self._runtime.failed(error)
        self._successors.publish()
        with self._lock:
            call = self._server(size).call
            if self._is_final(size):
                self._settle(size, call)
        return call

    def _server(self, size: int) -> _Server:
        """Return what serves a size now: the first, until the engine of its range is there."""
        return self._servers.get(sizes.at(size, self._starts), self._first)

    def _is_final(self, size: int) -> bool:
        """Return True if what serves a size now does so until another choice is made."""
        if self._decided or not self._is_learnt:
            return False
        if not self._winners:  # nothing could be measured, so the first serves all sizes
            return True
        return sizes.at(size, self._starts) in self._servers and self._is_near(size)

    def _settle(self, size: int, call: Compiled) -> None:
        """Have the calls of a size go straight to an engine, until something changes."""
        if len(self._settled) >= _KEPT:
            self._settled.clear()
        self._settled[size] = call

    # Choices

    def _learn(self) -> None:
        """Learn the first choice when it serves, and what is remembered of further sizes."""
        if self._is_learnt or not self._first.graph.is_chosen:
            return
        first = Decision(self._successors.record.report.attempts, self._first.graph.ranking)
        known = [] if first.size is None else self._successors.decisions()
        with self._lock:
            if self._is_learnt:
                return
            self._is_learnt = True
            if first.size is not None:
                self._servers[first.winner] = self._first
                for decision in (first, *known):
                    self._take(decision)

    def _is_due(self, size: int) -> bool:
        """Return True if a choice is to be made at this call; to be asked once for each call."""
        with self._lock:
            if not self._winners or self._is_near(size):
                return False
            alike = size.bit_length()
            self._seen[alike] += 1
            if self._seen[alike] < _SEEN:
                return False
            self._seen[alike] = 0
            self._asked.add(size)
            return True

    def _is_near(self, size: int) -> bool:
        """Return True if a size is not far from those that were measured, or are to be."""
        nearest = sorted(self._asked, key=lambda each: sizes.ratio(each, size))[:2]
        places = {self._winners[each] for each in nearest if each in self._winners}
        far = _FAR_BETWEEN if len(places) > 1 else _FAR
        return sizes.ratio(nearest[0], size) < far

    def _choose(self, size: int, args: Sequence[Any]) -> None:
        """Find the fastest for the inputs of a call, now or in the background."""
        try:
            if self._successors.in_background:
                self._successors.begin_selection(args, self._first.graph.is_wanted, self._tell)
            else:
                with self._runtime.waiting():
                    self._tell(self._successors.decide(args))
        except BaseException as error:
            with self._lock:
                self._asked.discard(size)  # if this is an interruption, another call chooses
                self._seen[size.bit_length()] = _SEEN
            control_flow.pass_on(error)
            with self._lock:
                self._asked.add(size)
            raise

    def _tell(self, decided: Decision | Undecided) -> None:
        """Have the next call follow a decision. Without one, the neighbours serve the size."""
        if isinstance(decided, Undecided):
            return
        with self._lock:
            self._decided.append(decided)
            self._settled.clear()

    def _follow(self) -> None:
        """Take the decisions that were made meanwhile, and remember them."""
        while self._decided:
            with self._lock:
                if not self._decided:  # another thread has taken it
                    return
                decision = self._decided.pop(0)
                self._take(decision, is_new=True)
            self._successors.remember(decision)

    def _take(self, decision: Decision, *, is_new: bool = False) -> None:
        """Have the winner of a decision serve the sizes around; with the lock held.

        Args:
            decision: The decision. Nothing follows from one without a measurement.
            is_new: True if the record does not have what was measured yet.
        """
        size = decision.size
        if size is None or size in self._winners:
            return
        place = self._admitted(decision)
        is_known = place in self._servers or place in self._winners.values()
        self._asked.add(size)
        self._winners[size] = place
        self._starts = sizes.ranges(self._winners)
        if not is_known:
            # Only the winner and eager can be unknown.
            self._to_load[place] = dataclasses.replace(
                decision,
                attempts=decision.serving_from(place),
                ranking=() if place is None else decision.ranking,
                lasts=False,
            )
            return
        if is_new:
            self._successors.note(decision.serving_from(place))
        if place in self._servers:  # else a call is about to build it, or does so now
            self._servers[place].successors.serves_at(size)

    def _admitted(self, decision: Decision) -> int | None:
        """Return the place of the best candidate, of those that serve if there are enough."""
        kept = {*self._winners.values()} - {None}
        if len(kept) < self._most:
            return decision.winner
        # Whoever is not in the ranking is slower than eager.
        return next((each for each in decision.ranking if each in kept), None)

    # Builds

    def _load(self, size: int, args: Sequence[Any]) -> None:
        """Build the engine that is to serve a size, unless that is done or under way."""
        with self._lock:
            place = sizes.at(size, self._starts)
            decision = self._to_load.pop(place, None)
        if decision is None:
            return
        try:
            with self._runtime.waiting():
                graph, successors = self._successors.sibling(decision, args)
        except BaseException as error:
            with self._lock:
                self._to_load[place] = decision  # if this is an interruption, another call builds
            control_flow.pass_on(error)
            with self._lock:
                self._to_load.pop(place, None)
                self._servers[place] = self._first
            raise
        with self._lock:
            self._servers[place] = _Server(graph, successors, calls.around(graph, self._runtime))
            for each, winner in self._winners.items():
                if winner == place:
                    successors.serves_at(each)
