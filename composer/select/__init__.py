"""Which of the candidates that are accepted serves a graph.

:mod:`~composer.select.choice` takes the first, or the fastest;
:mod:`~composer.select.remembered` goes straight to the one that was the fastest before.

To find the fastest, :func:`race` (:mod:`~composer.select.turns`) has the entrants of a
:mod:`~composer.select.contest` take turns on the first call's inputs
(:mod:`~composer.select.track`), measures time and memory (:mod:`~composer.select.footprint`), and
ends when :mod:`~composer.select.rules` say who has won.
"""

from __future__ import annotations

from composer.select.contest import Budget, Contest, Entrant, Result, Timing, obstacle
from composer.select.rules import TIE, surely_ahead
from composer.select.turns import race

__all__ = [
    "Budget",
    "Contest",
    "Entrant",
    "Result",
    "TIE",
    "Timing",
    "obstacle",
    "race",
    "surely_ahead",
]
