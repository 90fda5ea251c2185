"""``select = "fastest"``: measures which of several accepted engines runs a graph fastest.

All engines and the eager fallback (the captured graph's own forward) are timed on copies of the
first call's inputs. In training a call is a forward and a backward. Changes by a run are undone.

- *Rounds, not blocks.* The machine may be busy with other things as well. A round takes one sample
  of each participant, in an order drawn anew for each round. So a load that comes and goes meets
  all of them alike, and participants are compared by the ratios of each round. A sample is the mean
  time of some calls.
- *Length of samples.* :mod:`composer.chain.select.lengths` decides it.
- *Winning and leaving.* :mod:`composer.chain.select.rules` decides who is out and who has won.
- *The time is bounded.* No sample begins that would probably end too late, judged by the
  participant's earlier samples. A call cannot be interrupted, so one that takes longer than before
  may overrun. If there is no time for a round of all participants, only those close to the fastest
  go on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import random
import statistics
import sys
import time
from collections.abc import Sequence

from composer.chain.select import lengths
from composer.chain.select.benchmark import Budget, Participant, Result, Timing
from composer.chain.select.lengths import Plan
from composer.chain.select.rules import (
    TIE,
    at_most,
    first_of_the_best,
    in_front,
    surely_ahead,
)
from composer.chain.select.timer import Timer
from composer.errors import error_line, without_locals
from composer.records import GraphRequest
from composer.system import control_flow
from composer.system.hardware import Waits


class _Undecided(Exception):
    """Raised if the benchmark cannot be run; the text is the reason."""


def measure(
    participants: Sequence[Participant],
    request: GraphRequest,
    budget: Budget,
) -> Result:
    """Time the participants in rounds until one is surely ahead, or the time is over.

    Args:
        participants: In the order of the chain; the last is the eager fallback.
        request: The graph and the first call's inputs, which are not changed.
        budget: How long this may take.

    Returns:
        The result. It has no winner if the eager fallback itself raises for these inputs, inputs
        cannot be copied, or the time was too short for two calls of each participant.
    """
    started = time.perf_counter()
    errors: dict[int, BaseException] = {}
    try:
        with contextlib.ExitStack() as laid_out:
            timer = _timer(request, laid_out)
            rounds = _Rounds(participants, timer, budget, errors)
            rounds.warm_up()
            waits = Waits.from_now()
            rounds.run()
            under_load = waits.beside_load()
        result = dataclasses.replace(rounds.result(), under_load=under_load)
    except _Undecided as undecided:
        result = Result(None, {}, errors, str(undecided))
    return dataclasses.replace(result, seconds=time.perf_counter() - started)


def _timer(request: GraphRequest, laid_out: contextlib.ExitStack) -> Timer:
    """Return a timer with copied inputs, which are kept until the stack ``laid_out`` is closed.

    Raises:
        _Undecided: inputs cannot be copied.
    """
    try:
        timer = Timer(request)
        laid_out.enter_context(timer.laid_out())
    except BaseException as error:  # noqa: BLE001  # recorded: what serves needs no copies
        control_flow.pass_on(error)
        raise _Undecided(f"inputs cannot be copied: {error_line(error)}") from None
    return timer


class _Rounds:
    """The samples that were taken so far, and the participants that may still win."""

    def __init__(
        self,
        participants: Sequence[Participant],
        timer: Timer,
        budget: Budget,
        errors: dict[int, BaseException],
    ) -> None:
        self._participants = participants
        self._timer = timer
        self._errors = errors
        self._deadline = time.perf_counter() + budget.seconds
        self._spare, self._least_rounds = budget.first, budget.least_rounds
        self._order = random.Random(0)
        self._warm: dict[int, float] = {}
        self._waiting: list[int] = []
        self._alive = list(range(len(participants)))
        self._samples: dict[int, list[float]] = {place: [] for place in self._alive}

    def warm_up(self) -> None:
        """Make two calls of each, eager's first, to see whether the program itself raises.

        Raises:
            _Undecided: the program raises, or there was no time.
        """
        *engines, fallback = range(len(self._participants))
        for place in (fallback, *engines):
            started = time.perf_counter()
            self._warm_up(place)
            # As far as the budget allows, a first call does not count.
            extension = min(time.perf_counter() - started, self._spare)
            self._spare -= extension
            self._deadline += extension
            self._warm_up(place)

    def _warm_up(self, place: int) -> None:
        if self._is_over():
            raise _Undecided("the time for it was too short for two calls of each engine")
        if place in self._alive:
            self._warm[place] = self._sample(place, Plan(calls=1))

    def run(self) -> None:
        """Take rounds, until one is left or the next sample would take too long.

        A round that is not completed is not used.
        """
        for number in range(lengths.MOST_ROUNDS):
            if self._is_settled():
                return
            if not self._fits(number):
                self._narrow()
                if self._is_settled() or not self._fits(number):
                    return
            times: dict[int, float] = {}
            # The order is drawn, so that nobody always runs behind the same one.
            for place in self._order.sample(self._alive, len(self._alive)):
                plan = self._planned(place, number)
                if self._is_over(after=plan.seconds(self._usual(place))):
                    return
                times[place] = self._sample(place, plan)
            for place in self._alive:
                self._samples[place].append(times[place])
            self._send_off()

    def _fits(self, number: int) -> bool:
        """Return True if there is time for the short samples of this round."""
        plans = {place: self._planned(place, number) for place in self._alive}
        taken = sum(plan.seconds(self._usual(place)) for place, plan in plans.items())
        return not self._is_over(after=taken)

    def _planned(self, place: int, number: int) -> Plan:
        return lengths.sample(self._usual(place), number)

    def _usual(self, place: int) -> float:
        return statistics.median(self._samples[place] or [self._warm[place]])

    def _narrow(self) -> None:
        """Let only participants close to the fastest go on, because time is short.

        The others are compared by the times that they have.
        """
        costs = {p: self._usual(p) + self._participants[p].build_share for p in self._alive}
        limit = lengths.CLOSE * min(costs.values())
        self._alive = at_most(limit, costs)
        self._waiting += costs.keys() - self._alive

    def _sample(self, place: int, plan: Plan) -> float:
        """Return the seconds of a call; a participant that raises is out, and its time infinite.

        Raises:
            _Undecided: the eager fallback itself raises.
        """
        handled = sys.exception()
        run = self._participants[place].run
        try:
            return self._timer.time(run, plan.calls, plan.lead)
        except BaseException as error:  # noqa: BLE001  # recorded: its attempt has failed
            control_flow.pass_on(error)
            if place == len(self._participants) - 1:
                raise _Undecided(f"eager itself raises {error_line(error)}") from None
            self._errors[place] = without_locals(error, handled)
            self._alive.remove(place)
            return math.inf

    def _is_over(self, after: float = 0.0) -> bool:
        """Return True if the time of the benchmark will be over ``after`` so many seconds."""
        return time.perf_counter() + after >= self._deadline

    def _costs(self, place: int) -> list[float]:
        return [each + self._participants[place].build_share for each in self._samples[place]]

    def _send_off(self) -> None:
        """Drop the participants that are surely behind the one in front."""
        if not self._alive:
            return
        best = self._costs(in_front({place: self._costs(place) for place in self._alive}))
        if len(best) < self._least_rounds:
            return
        # Nobody is surely ahead of itself, so the one in front stays.
        self._alive = [p for p in self._alive if not surely_ahead(best, self._costs(p), TIE)]

    def _is_settled(self) -> bool:
        """Return True if the first of those left is as good as the others, or is the only one."""
        if len(self._alive) < 2:
            return True
        first, *others = self._alive
        mine = self._costs(first)
        if len(mine) < self._least_rounds:
            return False
        return all(surely_ahead(mine, self._costs(each), 1 / TIE) for each in others)

    def result(self) -> Result:
        """Apply the rules: the winner is the first in the chain that is as good as the best.

        Raises:
            _Undecided: all participants that were not surely behind have raised.
        """
        timings = {p: self._timing(p) for p in self._samples if p not in self._errors}
        costs = {p: timings[p].costs for p in sorted((*self._alive, *self._waiting))}
        if not costs:
            raise _Undecided("all that were left raised")
        return Result(first_of_the_best(costs), timings, self._errors)

    def _timing(self, place: int) -> Timing:
        samples, build_share = self._samples[place], self._participants[place].build_share
        known = tuple(samples) or (self._warm[place],)
        return Timing(known, len(samples), build_share)
