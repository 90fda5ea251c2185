"""Splits the time of a compile into shared passes, each candidate, and the rest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from composer.records import BEFORE_AUTOGRAD, CompileReport
from composer.telemetry.html.words import percentages, sane

PASSES, REST = "passes", "rest"


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of the time of a graph's compile.

    ``kind`` is the status of an attempt, ``"passes"`` for the passes before all candidates, or
    ``"rest"`` for capture, policy and checks.
    """

    kind: str
    name: str
    seconds: float
    reason: str = ""


def pieces(graph: CompileReport) -> tuple[Piece, ...]:
    """Return the parts of a compile, in order. The rest comes last, since its time is unknown."""
    before = sum(sane(each.seconds) for each in graph.passes if each.stage in BEFORE_AUTOGRAD)
    found = [Piece(PASSES, "shared passes", before)] if before else []
    for each in graph.attempts:
        reason = str(each.reason or "")
        found.append(Piece(str(each.status), each.backend, sane(each.seconds), reason))
    rest = sane(graph.seconds) - sum(piece.seconds for piece in found)
    return (*found, Piece(REST, "composer", rest)) if rest > 1e-6 else tuple(found)


@dataclass(frozen=True, slots=True)
class Spent:
    """The time that all graphs spent on the pieces of one kind and name."""

    kind: str
    name: str
    pieces: int
    seconds: float
    percent: float


def spent(found: Iterable[Sequence[Piece]]) -> tuple[Spent, ...]:
    """Return the sums of the pieces of many graphs by kind and name, the longest first."""
    totals: dict[tuple[str, str], list[float]] = {}
    for each in (each for of_graph in found for each in of_graph):
        totals.setdefault((each.kind, each.name), []).append(each.seconds)
    order = sorted(totals.items(), key=lambda item: -sum(item[1]))
    percents = percentages([sum(seconds) for _, seconds in order])
    return tuple(
        Spent(kind, name, len(seconds), sum(seconds), percent)
        for ((kind, name), seconds), percent in zip(order, percents, strict=True)
    )
