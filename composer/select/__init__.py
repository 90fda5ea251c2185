"""Which of the candidates that are accepted serves a graph.

:mod:`~composer.select.choice` takes the first, or the fastest;
:mod:`~composer.select.remembered` goes straight to the one that was the fastest before.

To find the fastest, :func:`measure` (:mod:`~composer.select.rounds`) times the participants of
a :mod:`~composer.select.benchmark` in rounds, on the first call's inputs
(:mod:`~composer.select.timer`), measures memory (:mod:`~composer.select.footprint`), and ends when
:mod:`~composer.select.rules` say who has won.
"""

from __future__ import annotations

from composer.select.benchmark import Benchmark, Budget, Participant, Result, Timing, obstacle
from composer.select.rounds import measure
from composer.select.rules import TIE, surely_ahead

__all__ = [
    "Budget",
    "Benchmark",
    "Participant",
    "Result",
    "TIE",
    "Timing",
    "obstacle",
    "measure",
    "surely_ahead",
]
