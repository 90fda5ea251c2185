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
from composer.chain.select.benchmark import in_ms
from composer.chain.select.footprint import MIB, Gauge
from composer.chain.select.rules import lost_a_tie
from composer.errors import Refusal, first_line, text_of
from composer.graphs.comparison import Bounds, devices
from composer.records import EAGER, Attempt, End, GraphRequest, Outcome, PassRecord, Reason, Status

Made = tuple[Callable[..., Any], tuple[PassRecord, ...]]
"""A callable for a graph, and the shared passes that ran within it."""


@dataclass(frozen=True, slots=True)
class Tried:
    """The result of trying one candidate.

    Attributes:
        attempt: Its record.
        compiled: The callable that it compiled; ``None`` if it was not accepted.
        error: The error that ended the attempt; ``None`` if it was accepted.
        passes: The shared passes that ran within it.
        is_fallback: True if it runs the captured graph as it is (``eager``).
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
        tries: Tries the candidates lazily, in the order of the chain.
        fallback: Makes the eager fallback.
        why: Why the candidates could not be measured; empty if the policy does not ask for that.
    """
    made: list[Tried] = []
    for each in tries:
        if each.compiled is None:
            made.append(each)
            continue
        made.append(_timed(each, f"no: {why}") if why else each)
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
        tries: As in :func:`first`.
        fallback: Makes the eager fallback.
        request: The graph and the inputs to measure with.
        benchmark: The policy's settings for the measurement.
    """
    gauge = None
    if benchmark.within is not None:
        gauge = Gauge(devices(request.example_inputs))
        if not gauge.works:
            return first(tries, fallback, "this system does not tell what memory a process holds")
        tries = _weighed(tries, gauge)
    made = list(tries)
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
    order = result.ranking(len(field))
    serves = field[order[0]]
    for at, place in enumerate(racing):
        made[place] = _judged(field[at], at, serves, result)
    # An eager fallback that stands behind the chain has no place in it.
    ranking = [racing[at] for at in order if at < len(racing)]
    ranking += [at for at, e in enumerate(made) if e.attempt.reason is Reason.QUARANTINED]
    return outcome_of(made, serves, ranking=tuple(ranking))


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
    build_share = 0.0
    if benchmark.calls is not None and not each.is_fallback:
        build_share = each.attempt.seconds / benchmark.calls
    return select.Participant(each.attempt.backend, each.compiled, build_share, each.grown)


def _judged(each: Tried, at: int, serves: Tried, result: select.Result) -> Tried:
    """Return a participant with its times in the record, without its callable if it lost."""
    if at in result.errors:
        return _raised(each, result.errors[at])
    if each is serves:
        return _timed(each, f"no: {result.why}" if result.winner is None else result.figures(at))
    if result.winner is None:
        message = f"it was accepted, and not measured: {result.why}"
        refusal = Refusal(Status.SKIPPED, Reason.POLICY, message)
        attempt = dataclasses.replace(
            each.attempt, status=refusal.status, reason=refusal.reason, message=message
        )
        return Tried(attempt, None, refusal)
    slower = dataclasses.replace(
        each.attempt,
        status=Status.NOT_CHOSEN,
        reason=Reason.SLOWER,
        message=_slower(result, at, serves.attempt.who),
    )
    return Tried(slower.timed(result.figures(at)), None)


def _slower(result: select.Result, at: int, winner: str) -> str:
    timing, best = result.timings[at], result.best
    counted = ", its build counted" if timing.build_share else ""
    own = f"{in_ms(timing.cost):.3g} ms a call{_and_memory(timing)}{counted}"
    message = f"{own}; {winner} takes {in_ms(best.cost):.3g} ms{_and_memory(best)}"
    is_tie = timing.grown is None and lost_a_tie(timing.cost, best.cost)
    return with_circumstances(message, is_tie=is_tie, under_load=result.under_load)


def with_circumstances(message: str, *, is_tie: bool, under_load: bool) -> str:
    """Return the message of a participant that lost, with the circumstances.

    Args:
        message: Its time, and that of the winner.
        is_tie: True if it is as fast as the winner.
        under_load: True if other programs kept taking the cores during the benchmark.
    """
    tie = "; a tie goes to whoever stands first in the chain" if is_tie else ""
    load = "; measured under a load" if under_load else ""
    return f"{message}{tie}{load}"


def _and_memory(timing: select.Timing) -> str:
    """``" and 12 MiB"``; empty where memory was not measured."""
    return "" if timing.grown is None else f" and {timing.grown / MIB:.0f} MiB"


def _raised(each: Tried, error: BaseException) -> Tried:
    """Return a participant that raised in a sample or was refused, without its engine."""
    message = f"raised when it was measured on the first inputs: {first_line(text_of(error))}"
    refusal = Refusal(Status.FAILED, Reason.RAISED_AT_RUNTIME, message)
    if isinstance(error, Refusal):
        refusal = error
    attempt = dataclasses.replace(
        each.attempt,
        status=refusal.status,
        reason=refusal.reason,
        message=text_of(refusal),
        error_type=type(error).__name__,
        traceback="".join(traceback.format_exception(error)),
    )
    return Tried(attempt, None, error)


def _timed(each: Tried, timing: str | dict[str, Any]) -> Tried:
    return dataclasses.replace(each, attempt=each.attempt.timed(timing))
