"""``select = "fastest"``: which of several engines, all of them right, serves a graph soonest?

All take turns on copies of the first call's inputs, the captured graph's own forward (the floor)
among them. In training a call is a forward and a backward. What a run changes is put back.

How it decides, on a machine that is busy with other things as well:

- *Turns, not blocks.* A round gives each entrant one turn, in an order drawn anew for each round.
  A load that comes and goes meets all of them alike, and rounds are compared as pairs. A turn is
  made of as many calls as fill 10 ms, so that a clear case is clear soon, and of twice as many
  after each three rounds, up to 160 ms, where it is not: under a load, who has slept through the
  turns of others is let run undisturbed for a while, and would not show what it suffers. Beside a
  running program, whose calls wait for turns, they stay short.
- *Calls that do not count* begin each turn, for 10 ms. The threads of the one before go on spinning
  for some milliseconds, in wait for more work, and take the cores from the next: on two cores ONNX
  Runtime's made Inductor's code four times as slow. A call of 50 ms or more has no such lead: what
  is left of the spinning is little of it.
- *The mean.* What a program waits for under a load is the whole of its calls, and a load does not
  treat all alike: an engine whose threads wait for one another loses a time slice where another
  loses none. Any quantile hides that, and is less sure besides (``bench/choosing.py``). So that one
  standstill of a second does not decide, a turn counts for ten times the lower quartile at most.
- *Leaving early.* Against the one in front an entrant is out when it was more than 2 % behind on
  the average of the rounds, so far that chance alone has it so in 1 of 1,000 (a paired t-test,
  after six rounds at least), or when even its quickest turn is far behind the other's median:
  three times after four rounds, half as much again after six. That one which is 5 % quicker is
  lost in this way takes such a streak of bad luck against it.
- *A tie* is for the one that stands first in the chain: of those that are not out, and within 2 %
  of the best. The floor stands last, so nobody serves who is more than that behind it. The contest
  ends as soon as the first of those left is as surely no more than 2 % behind any other.

Where memory is the objective, an entrant is out when it is as surely further behind than the policy
lets it be; of the others, :func:`least_memory` decides when the rounds are over.

The time for this is bounded: no turn begins that is likely to end beyond it, by what the entrant
took before. A call cannot be interrupted, so one that takes longer than that does end beyond it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from composer import _torch
from composer.errors import text_of
from composer.graphs import collectives
from composer.guard.gate import Gate
from composer.policy import Policy
from composer.records import GraphRequest, first_line
from composer.select.footprint import Gauge
from composer.select.track import Track
from composer.store import verdicts

TIE = 1.02
"""How much slower than the best is still as good."""

SHARE, LEAST, MOST = 0.15, 1.0, 5.0
"""Where the policy gives no time: a share of the seconds that the builds took, within limits."""

_SAME_BYTES, _SAME_SHARE = 8 << 20, 0.05
"""By how much two readings of the same differ at most."""

_LEAD, _LONG = 0.010, 0.050
_TURN, _LONGEST_TURN, _LONGER = 0.010, 0.160, 3
_MOST_CALLS = 1000
_MOST_ROUNDS = 40
_SURE_ROUNDS = 6
_SURE = statistics.NormalDist().inv_cdf(1 - 1 / 1000)
_OUTLIER = 10.0
_FAR_BEHIND = ((4, 3.0), (6, 1.5))
"""After how many rounds an entrant is out whose best is so many times the other's median."""


@dataclass(frozen=True, slots=True)
class Contest:
    """What the policy wants of a choice by measurement.

    Attributes:
        seconds: What it may take; ``None`` for a share of the builds.
        calls: Over how many calls the seconds of a build are counted; ``None`` does not count them.
        within: By which share one may be slower than the fastest and win by taking less memory;
            ``None`` does not look at memory.
        terms: On which its verdict is remembered; ``None`` for not at all.
        gate: Where the turns are taken beside a running program; ``None`` where that waits.
    """

    seconds: float | None = None
    calls: int | None = None
    within: float | None = None
    terms: verdicts.Terms | None = None
    gate: Gate | None = None

    @staticmethod
    def of(policy: Policy) -> Contest | None:
        """The policy's; ``None`` where the first that is accepted is to serve."""
        if policy.select == "first":
            return None
        objective = policy.objective
        calls = objective.calls if objective.kind == "amortised" else None
        within = objective.within if objective.kind == "memory" else None
        return Contest(policy.select_seconds, calls, within, verdicts.Terms.of(policy))

    def budget(self, built: float) -> float:
        """Seconds for a contest among engines that took ``built`` seconds to build."""
        return min(MOST, max(LEAST, SHARE * built)) if self.seconds is None else self.seconds


@dataclass(frozen=True, slots=True)
class Entrant:
    """One that takes part: its name, what is called, and seconds that count as part of a call.

    ``grown`` is by how many bytes the process grew when it was built.
    """

    name: str
    run: Callable[..., Any]
    handicap: float = 0.0
    grown: int = 0


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds a call in each turn of one entrant; ``cost`` has the handicap in it.

    ``grown`` are the bytes that it takes, ``None`` where nobody asked.
    """

    turns: tuple[float, ...]
    rounds: int
    handicap: float = 0.0
    grown: int | None = None

    @property
    def seconds(self) -> float:
        """What a call takes: the mean of the turns, none of which counts for more than it may."""
        return _mean(self.turns)

    @property
    def cost(self) -> float:
        """What entrants are compared by."""
        return self.seconds + self.handicap


@dataclass(frozen=True, slots=True)
class Result:
    """What was found, by places among the entrants.

    Attributes:
        winner: Who is to serve; ``None`` where nothing was found.
        timings: Of those that were measured.
        errors: Of those that raised.
        why: What was in the way where nothing was found.
        seconds: What finding it took.
    """

    winner: int | None
    timings: Mapping[int, Timing]
    errors: Mapping[int, Exception]
    why: str = ""
    seconds: float = 0.0


class _Undecided(Exception):
    """Nothing can be found, and why."""


def obstacle(request: GraphRequest, *, among_ranks: bool) -> str:
    """Why a graph's engines cannot be measured; empty where they can.

    Args:
        request: The graph and the first call's inputs.
        among_ranks: Whether other ranks of ``torch.distributed`` are to take the same engine.
    """
    if any(isinstance(value, _torch.FakeTensor) for value in request.example_inputs):
        return "the graph was compiled without real inputs"
    if collectives.meets_other_ranks(request.gm):
        return "other ranks would have to run the graph's collectives as well"
    if among_ranks and _torch.world_size() > 1:
        return "all ranks are to take the same engine, and each would measure another"
    return ""


def race(
    entrants: Sequence[Entrant],
    request: GraphRequest,
    seconds: float,
    within: float | None = None,
    gauge: Gauge | None = None,
    gate: Gate | None = None,
) -> Result:
    """Let the entrants take turns until one is surely ahead, or the time is over.

    Args:
        entrants: In the order of the chain; the last is the floor.
        request: The graph and the first call's inputs, which are not changed.
        seconds: How long this may take.
        within: As in :class:`Contest`.
        gauge: What memory is told by, where that is given.
        gate: As in :class:`Contest`; the time is that of the turns alone.

    Returns:
        What was found: no winner where the floor itself raises for these inputs, or the time was
        too short for two calls of each.
    """
    started = time.perf_counter()
    errors: dict[int, Exception] = {}
    try:
        with contextlib.ExitStack() as laid_out:
            track = _track(request, laid_out)
            runners = _Race(entrants, track, started + seconds, within, gauge, gate, errors)
            runners.warm_up()
            runners.run()
        result = runners.result()
    except _Undecided as undecided:
        result = Result(None, {}, errors, str(undecided))
    return dataclasses.replace(result, seconds=time.perf_counter() - started)


def _track(request: GraphRequest, laid_out: contextlib.ExitStack) -> Track:
    """Where turns are taken, until ``laid_out`` is left.

    Raises:
        _Undecided: inputs cannot be copied.
    """
    try:
        track = Track(request)
        laid_out.enter_context(track.laid_out())
    except Exception as error:  # noqa: BLE001  # recorded: what serves needs no copies
        what = f"{type(error).__name__}: {first_line(text_of(error))}"
        raise _Undecided(f"inputs cannot be copied: {what}") from None
    return track


class _Race:
    """The turns that were taken so far, and who may still win."""

    def __init__(
        self,
        entrants: Sequence[Entrant],
        track: Track,
        deadline: float,
        within: float | None,
        gauge: Gauge | None,
        gate: Gate | None,
        errors: dict[int, Exception],
    ) -> None:
        self._within, self._gauge, self._gate = within, gauge, gate
        self._grown: dict[int, int] = {}
        self._entrants = entrants
        self._track = track
        self._deadline = deadline
        self._warm: dict[int, float] = {}
        self._turns: dict[int, list[float]] = {}
        self.errors = errors
        self._alive: list[int] = []

    def warm_up(self) -> None:
        """Two calls of each, the floor's first: it tells whether the program itself raises.

        Raises:
            _Undecided: it does, or there was no time.
        """
        *engines, floor = range(len(self._entrants))
        self._alive = [*engines, floor]
        self._turns = {place: [] for place in self._alive}
        for place in (floor, *engines):
            with self._weighed(place):
                self._warm_up(place)

    def _warm_up(self, place: int) -> None:
        # The first may compile, allocate or tune, and no call waits; the second tells the time.
        for gate in (None, self._gate):
            if self._is_over():
                raise _Undecided("the time for it was too short for two calls of each engine")
            if place in self._alive:
                self._warm[place] = self._turn(place, 1, gate=gate)

    @contextlib.contextmanager
    def _weighed(self, place: int) -> Iterator[None]:
        """Note what an entrant takes, its first calls and their peak included.

        To collect the garbage takes a while, which is not taken from the time for turns.
        """
        if self._gauge is None:
            yield
            return
        before = self._read(self._gauge)
        self._gauge.begin_peak()
        yield
        taken = max(self._gauge.peak(), self._read(self._gauge)) - before
        self._grown[place] = self._entrants[place].grown + max(taken, 0)

    def _read(self, gauge: Gauge) -> int:
        started = time.perf_counter()
        held = gauge.held()
        self._deadline += time.perf_counter() - started
        return held

    def run(self) -> None:
        """Rounds, until one is left or the next turn would take too long.

        A round that is cut short is left out.
        """
        order = random.Random(0)
        for number in range(_MOST_ROUNDS):
            if self._is_settled():
                return
            times: dict[int, float] = {}
            length = self._length(number)
            for place in order.sample(self._alive, len(self._alive)):
                usual = _mean(self._turns[place] or [self._warm[place]])
                calls = min(math.ceil(length / max(usual, 1e-9)), _MOST_CALLS)
                lead = _LEAD if usual < _LONG else 0.0
                if self._is_over(after=lead + calls * usual):
                    return
                times[place] = self._turn(place, calls, lead, self._gate)
            for place in self._alive:
                self._turns[place].append(times[place])
            self._send_off()

    def _length(self, number: int) -> float:
        """Seconds of a turn in this round; where calls wait for turns, they stay short."""
        longest = _LONGEST_TURN if self._gate is None else _TURN
        return min(math.ldexp(_TURN, number // _LONGER), longest)

    def _turn(self, place: int, calls: int, lead: float = 0.0, gate: Gate | None = None) -> float:
        """Seconds a call; who raises is out, and where that is the floor, nothing can be found.

        Raises:
            _Undecided: it is.
        """
        try:
            turn = functools.partial(self._track.time, self._entrants[place].run, calls, lead)
            return turn() if gate is None else self._between_calls(turn, gate)
        except Exception as error:  # noqa: BLE001  # recorded: its attempt has failed
            if place == len(self._entrants) - 1:
                what = f"{type(error).__name__}: {first_line(text_of(error))}"
                raise _Undecided(f"eager itself raises {what}") from None
            self.errors[place] = error
            self._alive.remove(place)
            return math.inf

    def _between_calls(self, turn: Callable[[], float], gate: Gate) -> float:
        """What waiting for the program's calls takes is not taken from the time for turns."""
        waited = gate.waited
        try:
            return gate.perform(turn)
        finally:
            self._deadline += gate.waited - waited

    def _is_over(self, after: float = 0.0) -> bool:
        """Whether the time for this is over, or will be after so many seconds."""
        return time.perf_counter() + after >= self._deadline

    def _costs(self, place: int) -> list[float]:
        return [each + self._entrants[place].handicap for each in self._turns[place]]

    def _send_off(self) -> None:
        """Those that are surely behind the one in front take no more turns."""
        front = min(self._alive, key=lambda place: _mean(self._costs(place)))
        best, margin = self._costs(front), _margin(self._within)
        self._alive = [
            place
            for place in self._alive
            if place == front or not surely_ahead(best, self._costs(place), margin)
        ]

    def _is_settled(self) -> bool:
        """Whether the first of those left is as good as any other, or there is no other."""
        first, *others = self._alive
        if self._within is not None:
            return not others
        mine = self._costs(first)
        return all(surely_ahead(mine, self._costs(each), 1 / TIE) for each in others)

    def result(self) -> Result:
        """The first, in the order of the chain, that is as good as the best."""
        timings = {
            place: Timing(
                tuple(turns) or (self._warm[place],),
                len(turns),
                entrant.handicap,
                self._grown.get(place),
            )
            for place, turns in self._turns.items()
            if place not in self.errors
            for entrant in (self._entrants[place],)
        }
        costs = {place: timings[place].cost for place in self._alive}
        if self._within is not None:
            costs = least_memory(costs, self._grown, self._within)
        return Result(_first_of_the_best(costs), timings, self.errors)


def least_memory(
    costs: Mapping[int, float], grown: Mapping[int, int], within: float
) -> dict[int, float]:
    """Those that take the least memory, of those that take not much longer than the fastest.

    Args:
        costs: Seconds of each entrant, by its place.
        grown: Bytes of each.
        within: By which share one may be slower.

    Returns:
        The seconds of those left: what differs by 8 MiB or 5 % is no less memory.
    """
    limit = _margin(within) * min(costs.values())
    fit = [place for place, cost in costs.items() if cost <= limit]
    least = min(grown[place] for place in fit)
    most = least + max(_SAME_BYTES, _SAME_SHARE * least)
    return {place: costs[place] for place in fit if grown[place] <= most}


def _margin(within: float | None) -> float:
    """How much slower than the best is still good enough."""
    return max(TIE, 1 + (within or 0.0))


def _first_of_the_best(costs: Mapping[int, float]) -> int:
    best = min(costs.values())
    return next(place for place, cost in costs.items() if cost <= TIE * best)


def surely_ahead(front: Sequence[float], other: Sequence[float], margin: float) -> bool:
    """Whether one is faster than another, by times taken in the same rounds.

    Args:
        front: Of the one.
        other: Of the other.
        margin: By what factor it has to be faster.
    """
    if not front:
        return False
    rounds, typical = len(front), statistics.median(front)
    if any(rounds >= least and min(other) > far * typical for least, far in _FAR_BEHIND):
        return True
    if rounds < _SURE_ROUNDS:
        return False
    pairs = zip(_limited(front), _limited(other), strict=True)
    behind = [theirs - margin * mine for mine, theirs in pairs]
    mean = statistics.fmean(behind)
    error = statistics.stdev(behind) / math.sqrt(rounds)
    return mean > 0 and mean >= _student(rounds - 1) * error


def _student(freedom: int) -> float:
    """What Student's t exceeds by chance in 1 of 1,000; Abramowitz and Stegun, 26.7.5."""
    z = _SURE
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


def _mean(times: Sequence[float]) -> float:
    return statistics.fmean(_limited(times))


def _limited(times: Sequence[float]) -> list[float]:
    """No time longer than ten times the lower quartile."""
    limit = _OUTLIER * sorted(times)[(len(times) - 1) // 4]
    return [min(each, limit) for each in times]
