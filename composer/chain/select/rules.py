"""The rules by which measured times decide a benchmark: pure functions, without a clock.

- *The mean.* Participants are compared by the mean, because a program waits for the sum of its
  calls. A load does not affect all engines alike: an engine whose threads wait for one another
  loses a time slice where another loses none. A quantile hides that, and is also less certain
  (``bench/choosing.py``). A sample counts for at most ten times the lower quartile, so that a
  single stall of a second does not decide.
- *Leaving early.* A participant is out against the one in front when it was more than 2 % behind on
  the average of the rounds, by so much that chance alone would do that in 1 of 1,000 cases (a
  paired t-test, after six rounds at least). It is also out when even its quickest sample is far
  behind the other's median: four times after two rounds, three times after four, one and a half
  times after six. A participant that is 5 % quicker is lost by this only after such a streak of bad
  luck.
- *A tie* goes to the one that stands first in the chain, among those that are not out and within
  2 % of the best. The eager fallback stands last, so no engine serves that is more than 2 % slower
  than it. The benchmark ends as soon as the first of those left is known, with the same certainty,
  to be no more than 2 % behind any other.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

TIE = 1.02
"""A participant is as good as the best if it takes at most this many times as long."""

_SURE_ROUNDS = 6
_SURE = statistics.NormalDist().inv_cdf(1 - 1 / 1000)
_OUTLIER = 10.0
_FAR_BEHIND = ((2, 4.0), (4, 3.0), (6, 1.5))
"""Pairs of rounds and a factor: after so many rounds, a participant is out if its best sample is
more than that factor of the other's median."""


def at_most(limit: float, figures: Mapping[int, float]) -> list[int]:
    """Return the places whose figure is not more than the limit, in their order."""
    return [place for place, figure in figures.items() if figure <= limit]


def first_of_the_best(costs: Mapping[int, float]) -> int:
    """Return the first place, in the order of ``costs``, that ties with the fastest."""
    return at_most(TIE * min(costs.values()), costs)[0]


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
    rounds = len(front)
    for least, far in _FAR_BEHIND:
        if rounds >= least and min(other) > far * statistics.median(front):
            return True
    if rounds < _SURE_ROUNDS:
        return False
    pairs = zip(_limited(front), _limited(other), strict=True)
    behind = [theirs - margin * mine for mine, theirs in pairs]
    mean = statistics.fmean(behind)
    error = statistics.stdev(behind) / math.sqrt(rounds)
    return mean > 0 and mean >= _student(rounds - 1) * error


def _student(freedom: int) -> float:
    """Return the value that Student's t exceeds by chance in 1 of 1,000 cases.

    The expansion is Abramowitz and Stegun's, 26.7.5.
    """
    z = _SURE
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


def times_as_fast(mine: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """Return the relative speed of two participants: median and quartiles of the rounds' ratios.

    Args:
        mine: Seconds of a call of the first participant, in each round.
        theirs: Seconds of a call of the other. Only rounds that both took part in count; there is
            at least one.
    """
    ratios = [other / own for own, other in zip(mine, theirs, strict=False)]
    if len(ratios) == 1:
        return ratios[0], ratios[0], ratios[0]
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return median, low, high


def mean(times: Sequence[float]) -> float:
    """Return the mean of a participant's times, outliers cut to ten times the lower quartile."""
    return statistics.fmean(_limited(times))


def _limited(times: Sequence[float]) -> list[float]:
    limit = _OUTLIER * sorted(times)[(len(times) - 1) // 4]
    return [min(each, limit) for each in times]
