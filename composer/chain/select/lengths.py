"""Decides how long each sample is: pure functions, without a clock.

A sample begins with a lead, calls that are not timed. Then calls are timed together.

| lead | calls that are timed |
|---|---|
| 10 ms; none before calls of 50 ms | 10 ms, doubled every 3 rounds, at most 160 ms |

- *The lead.* The threads of the previous participant spin for some milliseconds, waiting for more
  work, and take the cores from the next: on two cores ONNX Runtime's threads made Inductor's code
  four times as slow. Of calls of 50 ms or more that is a small part.
- *Samples that grow.* A clear case is decided soon, and an unclear one by long samples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MOST_ROUNDS = 40

CLOSE = 1.5
"""If time is short, only participants that take at most this many times as long as the fastest
go on."""

_LEAD, _NEEDS_NO_LEAD = 0.010, 0.050
_FIRST, _LONGEST, _ROUNDS_OF_A_LENGTH = 0.010, 0.160, 3
_MOST_CALLS = 1000


@dataclass(frozen=True, slots=True)
class Plan:
    """How one sample is to be taken.

    Attributes:
        calls: How many calls are timed together.
        lead: Seconds of calls before them that are not timed.
    """

    calls: int
    lead: float = 0.0

    def seconds(self, usual: float) -> float:
        """Return the expected seconds of the sample if a call usually takes ``usual`` seconds."""
        return self.lead + self.calls * usual


def sample(usual: float, number: int) -> Plan:
    """Return the plan of a sample.

    Args:
        usual: Seconds of a call, as far as known.
        number: The number of the round, from 0.
    """
    length = min(math.ldexp(_FIRST, number // _ROUNDS_OF_A_LENGTH), _LONGEST)
    lead = _LEAD if usual < _NEEDS_NO_LEAD else 0.0
    return Plan(min(math.ceil(length / max(usual, 1e-9)), _MOST_CALLS), lead)
