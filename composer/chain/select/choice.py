"""Chooses among the tried candidates: the first that is accepted, or the fastest.

:func:`first` and :func:`fastest` take the candidates one by one, and a function that makes the
eager fallback. Engines that are not chosen are released: an outcome refers to one compiled callable
only.
"""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from composer import session
from composer.chain import select
from composer.chain.select.footprint import MIB, Gauge
from composer.chain.select.rules import lost_a_tie, times_as_fast
from composer.errors import Refusal, first_line, text_of
from composer.graphs.comparison import Bounds, devices
from composer.records import (
    EAGER,
    Attempt,
    End,
    GraphRequest,
    Outcome,
    PassRecord,
    Reason,
    Status,
)

Made = tuple[Callable[..., Any], tuple[PassRecord, ...]]
"""A callable for a graph, and the shared passes that ran within it."""

LOST_A_TIE = "; a tie goes to whoever stands first in the chain"
"""The text for a participant whose time is not longer than that of the one that serves."""

UNDER_LOAD = "; measured under a load"
"""The text for a benchmark during which other programs kept taking the cores."""


@dataclass(frozen=True, slots=True)
class Tried:
    """The result of trying one candidate.

    Attributes:
        attempt: Its record.
        compiled: The callable that it compiled; ``None`` if it was not accepted.
        error: The error that ended the attempt; ``None`` if it was accepted.
        passes: The shared passes that ran within it.
        is_floor: Whether it runs the captured graph as it is (``eager``).
        bounds: How far its numbers may be off eager's; ``None`` if they are not compared.
        grown: By how many bytes the process grew when it was built; 0 if that was not measured.
    """

    attempt: Attempt
    compiled: Callable[..., Any] | None
    error: BaseException | None = None
    passes: tuple[PassRecord, ...] = ()
    is_fallback: bool = False
    bounds: Bounds | None = None
    grown: int = 0


def first(tries: Iterable[Tried], fallback: Callable[[], Made], why: str = "") -> Outcome:
    """Choose the first candidate that is accepted, or the eager fallback.

    Args:
        tries: Tries the candidates lazily, in the order of the chain. Candidates after the first
            accepted one are not tried.
        fallback: Makes the eager fallback, which serves if no candidate is accepted.
        why: For the record, why the candidates could not be measured; empty if the policy does not
            ask for that.
    """
    made: list[Tried] = []
    for each in tries:
        made.append(_with_timing(each, f"no: {why}") if why else each)
        if each.compiled is not None:
            return outcome_of(made, each)
    return outcome_of(made, fallback_of(fallback()))


def fastest(
    tries: Iterable[Tried],
    fallback: Callable[[], Made],
    request: GraphRequest,
    benchmark: select.Benchmark,
) -> Outcome:
    """Try all candidates, and choose the fastest of the accepted ones and the eager fallback.

    Args:
        tries: Tries the candidates in the order of the chain.
        fallback: Makes the eager fallback.
        request: The graph and the inputs to measure with.
        benchmark: How the policy wants them measured.
    """
    gauge = None if benchmark.within is None else Gauge(devices(request.example_inputs))
    if gauge is not None and not gauge.works:
        return first(tries, fallback, "this system does not tell what memory a process holds")
    made = list(tries if gauge is None else _weighed(tries, gauge))
    racing = [place for place, each in enumerate(made) if each.compiled is not None]
    if not racing:
        return outcome_of(made, fallback_of(fallback()))
    field = [made[place] for place in racing]
    if not field[-1].is_fallback:
        field.append(fallback_of(fallback()))
    budget = benchmark.budget(sum(each.attempt.seconds for each in made))
    with session.current().progress.step(request, "measuring"):
        participants = [_participant(each, benchmark) for each in field]
        result = select.measure(
            participants, request, budget, benchmark.within, gauge, benchmark.barrier
        )
    winner, judged = _judged(field, result)
    # The eager fallback may stand behind the chain.
    for place, each in zip(racing, judged, strict=False):
        made[place] = each
    ahead = [racing[at] for at in _ranking(result, len(field)) if at < len(racing)]
    quarantined = [at for at, e in enumerate(made) if e.attempt.reason is Reason.QUARANTINED]
    return outcome_of(made, field[winner], ranking=(*ahead, *quarantined))


def _weighed(tries: Iterable[Tried], gauge: Gauge) -> Iterator[Tried]:
    """Yield the candidates, each with the bytes that its build added to the process."""
    tries, before = iter(tries), gauge.held()
    for each in tries:
        held = gauge.held()
        yield dataclasses.replace(each, grown=max(held - before, 0))
        before = held


def outcome_of(
    made: Sequence[Tried], serves: Tried, ranking: tuple[int, ...] | None = None
) -> Outcome:
    """Return the outcome of a walk that tried the candidates ``made`` and chose ``serves``."""
    assert serves.compiled is not None
    return Outcome(
        ends=tuple(End(each.attempt, each.error) for each in made),
        chosen=serves.attempt.backend,
        compiled=serves.compiled,
        passes=serves.passes,
        bounds=serves.bounds,
        ranking=ranking,
    )


def fallback_of(made: Made) -> Tried:
    """Return the eager fallback in the form of an accepted candidate."""
    compiled, passes = made
    attempt = Attempt(EAGER, Status.SUCCEEDED, None, "", 0.0)
    return Tried(attempt, compiled, None, passes, is_fallback=True)


def _participant(each: Tried, benchmark: select.Benchmark) -> select.Participant:
    assert each.compiled is not None
    counts = benchmark.calls is not None and not each.is_fallback
    build_share = each.attempt.seconds / benchmark.calls if counts and benchmark.calls else 0.0
    return select.Participant(each.attempt.backend, each.compiled, build_share, each.grown)


def _judged(field: Sequence[Tried], result: select.Result) -> tuple[int, list[Tried]]:
    """Return the place of the participant that serves, and all with their times in the records.

    If the benchmark has no result, the first participant that did not raise serves. The compiled
    callables of the others are released here.
    """
    fit = (at for at in range(len(field)) if at not in result.errors)
    winner = next(fit) if result.winner is None else result.winner
    judged = []
    for at, each in enumerate(field):
        if at in result.errors:
            judged.append(_raised(each, result.errors[at]))
        elif at == winner:
            judged.append(_with_timing(each, _figures(result, at, len(field) - 1)))
        else:
            judged.append(_beaten(each, at, field[winner].attempt.who, result, len(field) - 1))
    return winner, judged


def _beaten(each: Tried, at: int, winner: str, result: select.Result, fallback: int) -> Tried:
    if result.winner is None:
        what = f"it was accepted, and not measured: {result.why}"
        refusal = Refusal(Status.SKIPPED, Reason.POLICY, what)
        attempt = dataclasses.replace(
            each.attempt, status=refusal.status, reason=refusal.reason, message=what
        )
        return Tried(attempt, None, refusal)
    timing = result.timings[at]
    counted = ", its build counted" if timing.build_share else ""
    best = result.timings[result.winner]
    tie = LOST_A_TIE if timing.grown is None and lost_a_tie(timing.cost, best.cost) else ""
    own = f"{_ms(timing.cost):.3g} ms a call{_and_memory(timing)}{counted}"
    loaded = UNDER_LOAD if result.under_load else ""
    attempt = dataclasses.replace(
        _with_timing(each, _figures(result, at, fallback)).attempt,
        status=Status.NOT_CHOSEN,
        reason=Reason.SLOWER,
        message=f"{own}; {winner} takes {_ms(best.cost):.3g} ms{_and_memory(best)}{tie}{loaded}",
    )
    return Tried(attempt, None)


def _and_memory(timing: select.Timing) -> str:
    """``" and 12 MiB"``; empty where memory was not measured."""
    return "" if timing.grown is None else f" and {timing.grown / MIB:.0f} MiB"


def _figures(result: select.Result, at: int, fallback: int) -> str | dict[str, Any]:
    """Return the times of a participant for its record, with eager's time for comparison."""
    if result.winner is None:
        return f"no: {result.why}"
    timing = result.timings[at]
    figures = {
        "ms": _ms(timing.seconds),
        "least_ms": _ms(min(timing.samples)),
        "ratio": round(timing.seconds / result.timings[result.winner].seconds, 4),
        "rounds": timing.rounds,
        "eager_ms": _ms(result.timings[fallback].seconds),
        "seconds": round(result.seconds, 4),
    }
    both = min(timing.rounds, result.timings[fallback].rounds)
    if both >= 2 and at != fallback:
        spread = times_as_fast(timing.samples, result.timings[fallback].samples)
        names = ("over_eager", "over_eager_p25", "over_eager_p75")
        figures |= dict(zip(names, (round(each, 4) for each in spread), strict=True))
    if timing.build_share:
        figures["build_ms"] = _ms(timing.build_share)
    if result.under_load:
        figures["under_load"] = True
    if timing.grown is not None:
        figures["mib"] = round(timing.grown / MIB, 1)
    return figures


def _raised(each: Tried, error: BaseException) -> Tried:
    """Return a participant that raised in a sample or was refused, without its engine."""
    what = f"raised when it was measured on the first inputs: {first_line(text_of(error))}"
    refusal = Refusal(Status.FAILED, Reason.RAISED_AT_RUNTIME, what)
    refusal = error if isinstance(error, Refusal) else refusal
    attempt = dataclasses.replace(
        each.attempt,
        status=refusal.status,
        reason=refusal.reason,
        message=text_of(refusal),
        error_type=type(error).__name__,
        traceback="".join(traceback.format_exception(error)),
    )
    return Tried(attempt, None, error)


def _ranking(result: select.Result, count: int) -> list[int]:
    """Return the winner, then those that may serve if it fails, best first, none behind eager.

    If nothing was measured, these are all that did not raise, in the order of the chain.
    """
    fallback = count - 1
    if result.winner is None:
        return [at for at in range(count) if at not in result.errors]
    if result.winner == fallback:
        return [fallback]
    limit = select.TIE * result.timings[fallback].cost
    measured = ((at, timing.cost) for at, timing in result.timings.items())
    good = {at: cost for at, cost in measured if cost <= limit or at == result.winner}
    return sorted(good, key=lambda at: (at != result.winner, good[at]))


def _with_timing(each: Tried, timing: str | dict[str, Any]) -> Tried:
    if each.compiled is None:
        return each
    return dataclasses.replace(each, attempt=each.attempt.timed(timing))


def _ms(seconds: float) -> float:
    return float(f"{seconds * 1e3:.4g}")
