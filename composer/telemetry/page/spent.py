"""Where the time of a compile went: shared passes, each candidate, and the rest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from composer.records import BEFORE_AUTOGRAD, CompileReport
from composer.telemetry.page.words import percentages, sane

PASSES, REST = "passes", "rest"


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a graph's compile.

    ``kind`` is the attempt's status, ``"passes"`` for those that ran before the candidates, or
    ``"rest"``: capture, policy, checks.
    """

    kind: str
    name: str
    seconds: float
    reason: str = ""


def pieces(graph: CompileReport) -> tuple[Piece, ...]:
    """What a compile was spent on, in order; the rest, which is nowhere in particular, last."""
    before = sum(sane(each.seconds) for each in graph.passes if each.stage in BEFORE_AUTOGRAD)
    found = [Piece(PASSES, "shared passes", before)] if before else []
    for each in graph.attempts:
        reason = str(each.reason or "")
        found.append(Piece(str(each.status), each.backend, sane(each.seconds), reason))
    rest = sane(graph.seconds) - sum(piece.seconds for piece in found)
    return (*found, Piece(REST, "composer", rest)) if rest > 1e-6 else tuple(found)


@dataclass(frozen=True, slots=True)
class Spent:
    """What all graphs spent on one kind of piece with one name."""

    kind: str
    name: str
    pieces: int
    seconds: float
    percent: float


def spent(found: Iterable[Sequence[Piece]]) -> tuple[Spent, ...]:
    """Add up the pieces of many graphs by name and kind, the longest first."""
    totals: dict[tuple[str, str], list[float]] = {}
    for each in (each for of_graph in found for each in of_graph):
        totals.setdefault((each.kind, each.name), []).append(each.seconds)
    order = sorted(totals.items(), key=lambda item: -sum(item[1]))
    percents = percentages([sum(seconds) for _, seconds in order])
    return tuple(
        Spent(kind, name, len(seconds), sum(seconds), percent)
        for ((kind, name), seconds), percent in zip(order, percents, strict=True)
    )
