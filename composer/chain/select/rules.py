"""The rules by which measured times decide a benchmark: pure functions, without a clock.

- *Ratios of rounds.* Two participants are compared by the ratios of their times, round by round. A
  load that lasts for the two samples of a round slows both of them down. What counts is the median
  of the ratios, which a few disturbed rounds do not move. On the samples that the rules were tried
  on, taken beside several busy programs on two cores, they chose wrongly 20 times of 360, and means
  of the samples 35 times.
- *Leaving early.* A participant is out against the one in front when the ratios leave no doubt:
  when so many of them are above 1.02 that chance alone would do that in 1 of 1,000 cases (a sign
  test, after ten rounds at least). It is also out when all ratios are far above 1: at least four
  after two rounds, three after four, one and a half after six.
- *A tie* goes to the one that stands first in the chain, among those that are not out and whose
  median ratio to the one in front is at most 1.02. The eager fallback stands last, so no engine
  serves that is more than 2 % slower than it. The benchmark ends as soon as the first of those left
  is known, with the same certainty, to be no more than 2 % behind any other.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

TIE = 1.02
"""A participant is as good as the best if it takes at most this many times as long."""

_ONE_OF = 1000
"""Chance alone decides between two equals in at most one of so many cases."""

_FAR_BEHIND = ((2, 4.0), (4, 3.0), (6, 1.5))
"""Pairs of rounds and a ratio: after so many rounds, a participant is out if it took more than that
many times as long in each of them."""


def at_most(limit: float, figures: Mapping[int, float]) -> list[int]:
    """Return the places whose figure is not more than the limit, in their order."""
    return [place for place, figure in figures.items() if figure <= limit]


def ratios(mine: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Return how many times as long the other took, for each round that both took part in.

    Args:
        mine: Seconds of a call of one participant, in each round.
        theirs: Seconds of a call of the other. There is at least one round of both.
    """
    return [other / own for own, other in zip(mine, theirs, strict=False)]


def in_front(costs: Mapping[int, Sequence[float]]) -> int:
    """Return the place of the one that is the least behind any other.

    Args:
        costs: Seconds of a call in each round, by the places of the participants.
    """

    def behind(place: int) -> float:
        others = (ratios(each, costs[place]) for each in costs.values())
        return max(map(statistics.median, others))

    return min(costs, key=behind)


def first_of_the_best(costs: Mapping[int, Sequence[float]]) -> int:
    """Return the first place, in the order of ``costs``, that ties with the one in front."""
    front = costs[in_front(costs)]
    behind = {place: statistics.median(ratios(front, each)) for place, each in costs.items()}
    return at_most(TIE, behind)[0]


def lost_a_tie(cost: float, winner: float) -> bool:
    """Return True if a participant lost only because it is later in the chain than the winner."""
    return cost <= winner <= TIE * cost


def surely_ahead(front: Sequence[float], other: Sequence[float], margin: float) -> bool:
    """Return True if one participant is faster than another, and chance can be ruled out.

    Args:
        front: Seconds of a call of the first participant, in each round.
        other: Seconds of a call of the other, in the same rounds.
        margin: The factor by which the first has to be faster.
    """
    behind = ratios(front, other)
    rounds = len(behind)
    for least, far in _FAR_BEHIND:
        if rounds >= least and min(behind) > far:
            return True
    failed = sum(each <= margin for each in behind)
    by_chance = sum(math.comb(rounds, number) for number in range(failed + 1))
    return by_chance * _ONE_OF <= 1 << rounds


def times_as_fast(mine: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """Return the relative speed of two participants: median and quartiles of the rounds' ratios.

    Args:
        mine: Seconds of a call of the first participant, in each round.
        theirs: Seconds of a call of the other. There is at least one round of both.
    """
    found = ratios(mine, theirs)
    if len(found) == 1:
        return found[0], found[0], found[0]
    low, median, high = statistics.quantiles(found, n=4, method="inclusive")
    return median, low, high
