"""Chooses which of the accepted candidates serves a graph.

:mod:`~composer.chain.select.choice` takes the first, or the fastest;
:mod:`~composer.chain.select.remembered` goes straight to the one that was the fastest before.

To find the fastest, :func:`measure` (:mod:`~composer.chain.select.rounds`) times the participants
of a :mod:`~composer.chain.select.benchmark` in rounds, on the first call's inputs
(:mod:`~composer.chain.select.timer`), and ends when :mod:`~composer.chain.select.rules` say who has
won.
"""

from __future__ import annotations

from composer.chain.select.benchmark import Benchmark, Budget, Participant, Result, Timing, obstacle
from composer.chain.select.rounds import measure
from composer.chain.select.rules import TIE, surely_ahead

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
