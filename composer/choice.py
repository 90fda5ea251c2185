"""Which of the candidates that were tried serves the graph: the first accepted, or the fastest.

Both are given the candidates one by one, and what makes the floor. What is not chosen is let go:
an outcome refers to one compiled callable only.
"""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from composer import select, session
from composer.errors import Refusal, text_of
from composer.records import (
    Attempt,
    GraphRequest,
    Outcome,
    PassRecord,
    Reason,
    Status,
    first_line,
)

FLOOR = "eager"

Made = tuple[Callable[..., Any], tuple[PassRecord, ...]]
"""What serves a graph, and the shared passes that ran within it."""


@dataclass(frozen=True, slots=True)
class Tried:
    """One candidate behind its attempt: what it compiled, or the error that ended it.

    ``is_floor`` says that running the captured graph is what it does.
    """

    attempt: Attempt
    compiled: Callable[..., Any] | None
    error: Exception | None = None
    passes: tuple[PassRecord, ...] = ()
    is_floor: bool = False


def first(tries: Iterable[Tried], floor: Callable[[], Made], why: str = "") -> Outcome:
    """The first that is accepted serves, or the floor.

    Args:
        tries: The chain; what stands behind the one that is accepted is not tried.
        floor: Makes what serves where none is.
        why: What kept the candidates from being measured, for the record; empty where nobody asked
            for that.
    """
    made: list[Tried] = []
    for each in tries:
        made.append(_with_timing(each, f"no: {why}") if why else each)
        if each.compiled is not None:
            return _outcome(made, each.attempt.backend, (each.compiled, each.passes))
    return _outcome(made, FLOOR, floor())


def fastest(
    tries: Iterable[Tried],
    floor: Callable[[], Made],
    request: GraphRequest,
    contest: select.Contest,
) -> Outcome:
    """All are tried; of those accepted, and the floor, the one that takes the least time serves.

    Args:
        tries: The chain.
        floor: Makes what runs the captured graph.
        request: The graph and the inputs to measure with.
        contest: What the policy wants of that.
    """
    made = list(tries)
    racing = [place for place, each in enumerate(made) if each.compiled is not None]
    if not racing:
        return _outcome(made, FLOOR, floor())
    field = [made[place] for place in racing]
    if not field[-1].is_floor:
        field.append(_floor(floor()))
    entrants = [_entrant(each, contest) for each in field]
    budget = contest.budget(sum(each.attempt.seconds for each in field))
    try:
        with session.current().progress.step(request, "measuring"):
            verdict = select.fastest(entrants, request, budget)
    except select.Undecided as undecided:
        return _unmeasured(made, racing, str(undecided))
    judged = _judged(field, verdict)
    winner = judged[verdict.winner]
    for place, each in zip(racing, judged, strict=False):
        made[place] = each
    ahead = [racing[at] for at in _ranking(verdict, len(field) - 1) if at < len(racing)]
    outcome = _outcome(made, winner.attempt.backend, (entrants[verdict.winner].run, winner.passes))
    return dataclasses.replace(outcome, ranking=(*ahead, *_quarantined(made)))


def _outcome(made: Sequence[Tried], chosen: str, serves: Made) -> Outcome:
    errors = tuple(each.error for each in made if each.error is not None)
    return Outcome(tuple(each.attempt for each in made), errors, chosen, *serves)


def _floor(made: Made) -> Tried:
    compiled, passes = made
    attempt = Attempt(FLOOR, Status.SUCCEEDED, None, "", 0.0)
    return Tried(attempt, compiled, None, passes, is_floor=True)


def _entrant(each: Tried, contest: select.Contest) -> select.Entrant:
    assert each.compiled is not None
    counts = contest.calls is not None and not each.is_floor
    handicap = each.attempt.seconds / contest.calls if counts and contest.calls else 0.0
    return select.Entrant(each.attempt.backend, each.compiled, handicap)


def _unmeasured(made: Sequence[Tried], racing: Sequence[int], why: str) -> Outcome:
    """The first that was accepted serves; those behind it were built in vain."""
    told = list(made)
    told[racing[0]] = chosen = _with_timing(made[racing[0]], f"no: {why}")
    what = f"it was accepted, and not measured: {why}"
    for place in racing[1:]:
        refusal = Refusal(Status.SKIPPED, Reason.POLICY, what)
        told[place] = Tried(_refused(made[place].attempt, refusal), None, refusal)
    assert chosen.compiled is not None
    outcome = _outcome(told, chosen.attempt.backend, (chosen.compiled, chosen.passes))
    return dataclasses.replace(outcome, ranking=(*racing, *_quarantined(told)))


def _refused(attempt: Attempt, refusal: Refusal) -> Attempt:
    status, reason, message = refusal.status, refusal.reason, str(refusal)
    return dataclasses.replace(attempt, status=status, reason=reason, message=message)


def _judged(field: Sequence[Tried], verdict: select.Verdict) -> list[Tried]:
    """The entrants with what came of it in their attempts; nothing refers to what lost."""
    figures = _figures(verdict, len(field) - 1)
    best = field[verdict.winner].attempt.backend, verdict.timings[verdict.winner].cost
    judged = []
    for at, each in enumerate(field):
        if at in verdict.errors:
            judged.append(_raised(each, verdict.errors[at]))
            continue
        told = _with_timing(each, figures[at])
        judged.append(told if at == verdict.winner else _slower(told, verdict.timings[at], *best))
    return judged


def _figures(verdict: select.Verdict, floor: int) -> dict[int, dict[str, Any]]:
    """What the record says of each one's time; the floor's stands with every other."""
    best = verdict.timings[verdict.winner].seconds
    return {
        at: {
            "ms": _ms(timing.seconds),
            "least_ms": _ms(min(timing.turns)),
            "ratio": round(timing.seconds / best, 4),
            "rounds": timing.rounds,
            "eager_ms": _ms(verdict.timings[floor].seconds),
            **({"build_ms": _ms(timing.handicap)} if timing.handicap else {}),
            "seconds": round(verdict.seconds, 4),
        }
        for at, timing in verdict.timings.items()
    }


def _slower(each: Tried, timing: select.Timing, winner: str, cost: float) -> Tried:
    counted = ", its build counted" if timing.handicap else ""
    mine, best = _ms(timing.cost), _ms(cost)
    what = f"{mine:.3g} ms a call{counted}; {winner} takes {best:.3g} ms"
    attempt = dataclasses.replace(
        each.attempt, status=Status.REJECTED, reason=Reason.SLOWER, message=what
    )
    return Tried(attempt, None)


def _raised(each: Tried, error: Exception) -> Tried:
    attempt = dataclasses.replace(
        each.attempt,
        status=Status.FAILED,
        reason=Reason.RAISED_AT_RUNTIME,
        message=f"raised when it was measured on the first inputs: {first_line(text_of(error))}",
        error_type=type(error).__name__,
        traceback="".join(traceback.format_exception(error)),
    )
    return Tried(attempt, None, error.with_traceback(None))  # its frames hold all that took part


def _ranking(verdict: select.Verdict, floor: int) -> list[int]:
    """The winner, then those that may follow it: none that is slower than the floor."""
    if verdict.winner == floor:
        return [floor]
    limit = select.TIE * verdict.timings[floor].cost
    good = {at: t.cost for at, t in verdict.timings.items() if t.cost <= limit}
    return sorted(good, key=lambda at: (at != verdict.winner, good[at]))


def _quarantined(made: Sequence[Tried]) -> list[int]:
    return [at for at, each in enumerate(made) if each.attempt.reason is Reason.QUARANTINED]


def _with_timing(each: Tried, timing: str | Mapping[str, Any]) -> Tried:
    if each.compiled is None:
        return each
    engine = each.attempt.engine | {"timing": timing}
    return dataclasses.replace(each, attempt=dataclasses.replace(each.attempt, engine=engine))


def _ms(seconds: float) -> float:
    return float(f"{seconds * 1e3:.4g}")
