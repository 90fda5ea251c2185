"""The reasons why candidates were not accepted, and their tracebacks, each once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from composer.errors import first_line
from composer.records import Attempt, CompileReport, Reason
from composer.telemetry.html.words import sane


@dataclass(frozen=True, slots=True)
class Fallback:
    """One reason why candidates were not accepted.

    ``backends`` has the number of attempts of each backend. ``said`` is the most frequent message,
    and ``others`` the number of other messages.
    """

    reason: Reason | None
    attempts: int
    graphs: int
    backends: tuple[tuple[str, int], ...]
    seconds: float
    said: str
    others: int


def fallbacks(graphs: Iterable[CompileReport]) -> tuple[Fallback, ...]:
    """Return the reasons why candidates were not accepted, the most frequent first."""
    found: dict[Reason | None, list[tuple[int, Attempt]]] = {}
    for number, graph in enumerate(graphs):
        for attempt in graph.attempts:
            if not attempt.accepted:
                found.setdefault(attempt.reason, []).append((number, attempt))
    rows = (_fallback(reason, attempts) for reason, attempts in found.items())
    return tuple(sorted(rows, key=lambda row: (-row.attempts, str(row.reason))))


def _fallback(reason: Reason | None, found: list[tuple[int, Attempt]]) -> Fallback:
    attempts = [attempt for _, attempt in found]
    said = Counter(first_line(each.message) or each.error_type for each in attempts)
    return Fallback(
        reason,
        attempts=len(attempts),
        graphs=len({number for number, _ in found}),
        backends=tuple(Counter(each.backend for each in attempts).most_common()),
        seconds=sum(sane(each.seconds) for each in attempts),
        said=said.most_common(1)[0][0],
        others=len(said) - 1,
    )


@dataclass(frozen=True, slots=True)
class Trace:
    """One traceback, and the attempts that have it. ``number`` counts from 1 on the page."""

    number: int
    text: str
    error_type: str
    said: str
    backends: tuple[str, ...]
    attempts: int


def traces(graphs: Iterable[CompileReport]) -> dict[str, Trace]:
    """Return the tracebacks by their text, the most frequent first. Equal ones are merged."""
    found: dict[str, list[Attempt]] = {}
    for attempt in (each for graph in graphs for each in graph.attempts if each.traceback):
        found.setdefault(attempt.traceback, []).append(attempt)
    ordered = sorted(found.items(), key=lambda item: -len(item[1]))
    return {
        text: Trace(
            number,
            text,
            attempts[0].error_type,
            first_line(attempts[0].message),
            tuple(dict.fromkeys(each.backend for each in attempts)),
            len(attempts),
        )
        for number, (text, attempts) in enumerate(ordered, start=1)
    }
