"""The reasons why candidates were not accepted, and their tracebacks, each once."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from composer.errors import first_line
from composer.records import Attempt, CompileReport, Reason
from composer.telemetry.html.words import sane
from composer.telemetry.report import attempts_of


@dataclass(frozen=True, slots=True)
class Fallback:
    """One reason why candidates were not accepted.

    ``backends`` has the number of attempts of each backend. ``message`` is the most frequent one,
    and ``others`` the number of other messages.
    """

    reason: Reason | None
    attempts: int
    graphs: int
    backends: tuple[tuple[str, int], ...]
    seconds: float
    message: str
    others: int


def fallbacks(graphs: Iterable[CompileReport]) -> tuple[Fallback, ...]:
    """Return the reasons why candidates were not accepted, the most frequent first."""
    by_reason: defaultdict[Reason | None, list[tuple[int, Attempt]]] = defaultdict(list)
    for number, graph in enumerate(graphs):
        for attempt in graph.attempts:
            if not attempt.accepted:
                by_reason[attempt.reason].append((number, attempt))
    rows = [_fallback(reason, numbered) for reason, numbered in by_reason.items()]
    return tuple(sorted(rows, key=lambda row: (-row.attempts, str(row.reason))))


def _fallback(reason: Reason | None, numbered: list[tuple[int, Attempt]]) -> Fallback:
    """Return the row of a reason, from its attempts and the numbers of their graphs."""
    graphs, attempts = zip(*numbered, strict=True)
    messages = Counter(first_line(each.message) or each.error_type for each in attempts)
    most_frequent, _ = messages.most_common(1)[0]
    return Fallback(
        reason,
        attempts=len(attempts),
        graphs=len(set(graphs)),
        backends=tuple(Counter(each.backend for each in attempts).most_common()),
        seconds=sum(sane(each.seconds) for each in attempts),
        message=most_frequent,
        others=len(messages) - 1,
    )


@dataclass(frozen=True, slots=True)
class Trace:
    """One traceback, and the attempts that have it. ``number`` counts from 1 on the page."""

    number: int
    text: str
    error_type: str
    message: str
    backends: tuple[str, ...]
    attempts: int


def traces(graphs: Iterable[CompileReport]) -> dict[str, Trace]:
    """Return the tracebacks by their text, the most frequent first. Equal ones are merged."""
    by_text: defaultdict[str, list[Attempt]] = defaultdict(list)
    for attempt in attempts_of(graphs):
        if attempt.traceback:
            by_text[attempt.traceback].append(attempt)
    most_frequent_first = sorted(by_text.values(), key=len, reverse=True)
    rows = [_trace(number, each) for number, each in enumerate(most_frequent_first, start=1)]
    return {row.text: row for row in rows}


def _trace(number: int, attempts: list[Attempt]) -> Trace:
    first = attempts[0]
    return Trace(
        number,
        first.traceback,
        first.error_type,
        first_line(first.message),
        backends=tuple(dict.fromkeys(each.backend for each in attempts)),
        attempts=len(attempts),
    )
