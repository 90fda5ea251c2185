"""Splits the time of a compile into shared passes, each candidate, and the rest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

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
    early = [each for each in graph.passes if each.stage in BEFORE_AUTOGRAD]
    passes = Piece(PASSES, "shared passes", sum(sane(each.seconds) for each in early))
    parts = [passes] if passes.seconds else []
    for each in graph.attempts:
        reason = str(each.reason or "")
        parts.append(Piece(str(each.status), each.backend, sane(each.seconds), reason))
    rest = sane(graph.seconds) - sum(piece.seconds for piece in parts)
    if rest > 1e-6:
        parts.append(Piece(REST, "composer", rest))
    return tuple(parts)


@dataclass(frozen=True, slots=True)
class Spent:
    """The time that all graphs spent on the pieces of one kind and name."""

    kind: str
    name: str
    pieces: int
    seconds: float
    percent: float


def spent(graphs: Iterable[Sequence[Piece]]) -> tuple[Spent, ...]:
    """Return the sums of the pieces of many graphs by kind and name, the longest first."""
    seconds: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for piece in chain.from_iterable(graphs):
        seconds[piece.kind, piece.name].append(piece.seconds)
    rows = sorted(seconds.items(), key=lambda row: -sum(row[1]))
    percents = percentages([sum(lengths) for _, lengths in rows])
    return tuple(
        Spent(kind, name, len(lengths), sum(lengths), percent)
        for ((kind, name), lengths), percent in zip(rows, percents, strict=True)
    )
