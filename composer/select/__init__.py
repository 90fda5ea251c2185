"""Which of the candidates that are accepted serves a graph.

:func:`race` (:mod:`~composer.select.contest`) measures some against each other: on the first call's
inputs (:mod:`~composer.select.track`), for time and for memory (:mod:`~composer.select.footprint`).

By that, :mod:`~composer.select.choice` chooses, the first or the fastest, and
:mod:`~composer.select.remembered` goes straight to the one that was the fastest before.
"""

from __future__ import annotations

from composer.select.contest import (
    TIE,
    Contest,
    Entrant,
    Result,
    Timing,
    obstacle,
    race,
    surely_ahead,
)

__all__ = [
    "Contest",
    "Entrant",
    "Result",
    "TIE",
    "Timing",
    "obstacle",
    "race",
    "surely_ahead",
]
