"""Counts what composer does, compares the counts with a test's expectations, and waits.

The idea of the counts is vLLM's (``compilation/counter.py``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from composer import session
from composer.records import CompileReport, Status
from composer.telemetry.report import attempts_of


class _Follower:
    """A sink that remembers live reports."""

    def __init__(self) -> None:
        self.reports: list[CompileReport] = []

    def follow(self, report: CompileReport) -> None:
        self.reports.append(report)

    def emit(self, record: dict[str, Any]) -> None:
        """Do nothing: the reports that are followed are live."""


@contextmanager
def expect(
    *,
    graphs: int | None = None,
    served_by: str | Mapping[str, int] | None = None,
    reasons: Mapping[str, int] | None = None,
    calls: int | None = None,
    fallbacks: int | None = None,
    verified: int | None = None,
    **statuses: int,
) -> Iterator[list[CompileReport]]:
    """Count what composer does within the context, and compare at its end.

    Args:
        graphs: Graphs that are compiled.
        served_by: The backend that serves all of them, or how many each one serves.
        reasons: How many attempts end with each reason; other reasons are not checked.
        calls: Calls of graphs compiled within.
        fallbacks: Calls that the eager fallback answered for an engine.
        verified: Calls that were compared with eager.
        statuses: How many attempts end with each status: ``succeeded=1, failed=2``.

    Yields:
        The reports, as they come in.

    Raises:
        AssertionError: counts differ; the error says what was expected and what was seen.
        TypeError: a keyword is not a status.
    """
    unknown = sorted(set(statuses) - set(Status))
    if unknown:
        raise TypeError(f"expect() knows no {', '.join(unknown)}; statuses: {', '.join(Status)}")
    follower = _Follower()
    session.add_sink(follower)
    try:
        yield follower.reports
    finally:
        session.remove_sink(follower)
    seen = session.current().as_they_stand(follower.reports)
    if isinstance(served_by, str):
        served_by = {served_by: len(seen)}
    wanted: dict[str, Any] = {
        "graphs": graphs,
        "calls": calls,
        "fallbacks": fallbacks,
        "verified": verified,
        "served_by": served_by,
        **statuses,
    }
    for code, number in (reasons or {}).items():
        wanted[f"reason {code}"] = number
    counts = _counts(seen)
    mistakes = []
    for name, number in wanted.items():
        count = counts.get(name, 0)
        if number not in (None, count):
            mistakes.append(f"{name}: expected {number}, saw {count}")
    if mistakes:
        raise AssertionError("; ".join((*mistakes, *_refusals(seen))))


def _counts(reports: Sequence[CompileReport]) -> dict[str, Any]:
    """Return the counts under the names of :func:`expect`'s arguments; a count of 0 may lack."""
    attempts = list(attempts_of(reports))
    counters = [report.runtime.read() for report in reports]
    return {
        "graphs": len(reports),
        "calls": sum(each.calls for each in counters),
        "fallbacks": sum(each.fallbacks for each in counters),
        "verified": sum(each.verified for each in counters),
        "served_by": dict(Counter(report.chosen for report in reports)),
        **Counter(str(attempt.status) for attempt in attempts),
        **Counter(f"reason {attempt.reason}" for attempt in attempts),
    }


def _refusals(reports: Sequence[CompileReport]) -> Iterator[str]:
    """Yield a sentence for each attempt that was not accepted."""
    for report in reports:
        for attempt in report.attempts:
            if not attempt.accepted:
                yield f"graph {report.label}: {attempt.sentence()}"


def settle(timeout: float = 60.0) -> None:
    """Wait until nothing is built or measured in the background (``select`` with ``background``).

    Args:
        timeout: Seconds to wait at most.

    Raises:
        TimeoutError: background work is not finished by then.
    """
    if not session.current().background.settled(timeout):
        raise TimeoutError(f"something was still built or measured after {timeout:g} s")
