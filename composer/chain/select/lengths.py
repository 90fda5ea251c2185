"""Decides how long each sample is: pure functions, without a clock.

A sample begins with a lead, calls that are not timed. Then calls are timed together.

| | lead | calls that are timed |
|---|---|---|
| usually | 10 ms; none before calls of 50 ms | 10 ms, doubled every 3 rounds, at most 160 ms |
| under a load | 200 ms | 300 ms |

- *The lead.* The threads of the previous participant spin for some milliseconds, waiting for more
  work, and take the cores from the next: on two cores ONNX Runtime's threads made Inductor's code
  four times as slow. Of calls of 50 ms or more that is a small part.
- *Samples that grow.* A clear case is decided soon, and an unclear one by long samples.
- *A load.* If the system keeps taking cores from this process, two short rounds only remove the
  participants that are far behind. Then the long samples begin, and only these count. An engine's
  threads that have slept often wake on the same core. On two cores with a second busy program,
  Linux took 200 ms to spread them: ONNX Runtime's calls took 5.2 ms until then, and 3.7 ms
  afterwards. If time is short, lead and sample are cut by the same factor, so that the last sample
  ends with the time.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

MOST_ROUNDS = 40

CLOSE = 1.5
"""If time is short, only participants that take at most this many times as long as the fastest
go on."""

BUSY = 0.1
"""There is a load if a thread waits for a core for more than this share of its time. On two
cores: 0.02 to 0.05 alone, 0.12 to 0.15 beside a program that runs for a quarter of the time, 0.4 to
0.65 beside one that always runs."""

SCOUTING, FAR = 2, 2.0
"""How many rounds stay short under a load, and when a participant is far behind in them: when its
best sample took this many times as long as another's worst."""

_LEAD, _NEEDS_NO_LEAD = 0.010, 0.050
_FIRST, _LONGEST, _ROUNDS_OF_A_LENGTH = 0.010, 0.160, 3
_LOADED_LEAD, _LOADED_SAMPLE, _LEAST_SHARE = 0.200, 0.300, 0.100
_MOST_CALLS = 1000


@dataclass(frozen=True, slots=True)
class Plan:
    """How one sample is to be taken.

    Attributes:
        calls: How many calls are timed together.
        lead: Seconds of calls before them that are not timed.
        least: Seconds for which to repeat that; 0 to do it once.
    """

    calls: int
    lead: float = 0.0
    least: float = 0.0

    def seconds(self, usual: float) -> float:
        """Return the expected seconds of the sample if a call usually takes ``usual`` seconds."""
        return self.lead + self.calls * usual


def short_sample(usual: float, number: int) -> Plan:
    """Return the plan of a sample without a load.

    Args:
        usual: Seconds of a call, as far as known.
        number: The number of the round, from 0.
    """
    length = min(math.ldexp(_FIRST, number // _ROUNDS_OF_A_LENGTH), _LONGEST)
    lead = _LEAD if usual < _NEEDS_NO_LEAD else 0.0
    return Plan(_calls(length, usual), lead)


def long_sample(usual: float, share: float) -> Plan:
    """Return the plan of a sample under a load.

    Args:
        usual: Seconds of a call, as far as known.
        share: Seconds of lead and sample. Each ends with a whole call: half a call late or early.
    """
    lead = min(share * _LOADED_LEAD / (_LOADED_LEAD + _LOADED_SAMPLE), _LOADED_LEAD)
    rest = share - lead - usual / 2
    return Plan(_calls(_FIRST, usual), max(lead - usual / 2, 0.0), rest)


def share_of(left: float, usual: Collection[float], least_rounds: int) -> float | None:
    """Return the seconds of each long sample with its lead; ``None`` if no round fits.

    Args:
        left: Seconds that are left.
        usual: Seconds of a call of each participant. A sample has at least two calls.
        least_rounds: Samples are shortened so that at least this many rounds fit.
    """
    for_each = left / len(usual)
    rounds = max(1, least_rounds, int(for_each / (_LOADED_LEAD + _LOADED_SAMPLE)))
    share = for_each / rounds
    return share if share >= max(_LEAST_SHARE, 2 * max(usual)) else None


def _calls(length: float, usual: float) -> int:
    return min(math.ceil(length / max(usual, 1e-9)), _MOST_CALLS)
