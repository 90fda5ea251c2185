"""Chooses among the tried candidates: the first that is accepted, or the fastest.

Engines that are not chosen are released: an outcome refers to one compiled callable only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from composer import session
from composer.chain import select
from composer.chain.select.benchmark import in_ms
from composer.chain.select.rules import lost_a_tie
from composer.errors import Refusal, first_line, text_of
from composer.graphs import sizes
from composer.graphs.comparison import Bounds
from composer.records import EAGER, Attempt, End, GraphRequest, Outcome, PassRecord, Reason, Status


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
    """

    attempt: Attempt
    compiled: Callable[..., Any] | None
    error: BaseException | None = None
    passes: tuple[PassRecord, ...] = ()
    is_fallback: bool = False
    bounds: Bounds | None = None

    def with_fact(self, name: str, value: object) -> Tried:
        """Return it with a further fact in its record."""
        engine = self.attempt.engine | {name: value}
        return dataclasses.replace(self, attempt=dataclasses.replace(self.attempt, engine=engine))


def first(made: Sequence[Tried], serves: Tried, why: str = "") -> Outcome:
    """Choose the candidate that was accepted first, or the eager fallback.

    Args:
        made: The candidates that were tried, in the order of the chain.
        serves: The accepted candidate, or the eager fallback.
        why: Why the candidates could not be measured; empty if the policy does not ask for that.
    """
    told = f"no: {why}" if why else None
    made = [_timed(each, told) if each is serves and told else each for each in made]
    return outcome_of(made, serves)


def fastest(
    made: Sequence[Tried],
    fallback: Callable[[], Tried],
    request: GraphRequest,
    benchmark: select.Benchmark,
) -> Outcome:
    """Choose the fastest of the accepted candidates and the eager fallback.

    Args:
        made: The candidates that were tried, in the order of the chain.
        fallback: Makes the eager fallback.
        request: The graph and the inputs to measure with.
        benchmark: The policy's settings for the measurement.
    """
    made = list(made)
    racing = [place for place, each in enumerate(made) if each.compiled is not None]
    if not racing:
        return outcome_of(made, fallback())
    field = [made[place] for place in racing]
    if not field[-1].is_fallback:
        field.append(fallback())
    budget = benchmark.budget(sum(each.attempt.seconds for each in made))
    with session.current().progress.step(request, "measuring"):
        participants = [_participant(each, benchmark) for each in field]
        result = select.measure(participants, request, budget)
    result = dataclasses.replace(result, size=sizes.size_of(request))
    order = result.ranking(len(field))
    serves = field[order[0]]
    for at, place in enumerate(racing):
        made[place] = _judged(field[at], at, serves, result)
    # An eager fallback that stands behind the chain has no place in it.
    ranking = [racing[at] for at in order if at < len(racing)]
    ranking += [at for at, e in enumerate(made) if e.attempt.reason is Reason.QUARANTINED]
    return outcome_of(made, serves, ranking=tuple(ranking))


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


def fallback_of(
    compiled: Callable[..., Any], passes: tuple[PassRecord, ...], message: str = ""
) -> Tried:
    """Return the eager fallback in the form of an accepted candidate."""
    attempt = Attempt(EAGER, Status.SUCCEEDED, None, message, 0.0)
    return Tried(attempt, compiled, None, passes, is_fallback=True)


def _participant(each: Tried, benchmark: select.Benchmark) -> select.Participant:
    assert each.compiled is not None
    build_share = 0.0
    if benchmark.calls is not None and not each.is_fallback:
        build_share = each.attempt.seconds / benchmark.calls
    return select.Participant(each.attempt.backend, each.compiled, build_share)


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
    of_size = "" if result.size is None else f" of size {result.size:,}"
    own = f"{in_ms(timing.cost):.3g} ms a call{of_size}{counted}"
    message = f"{own}; {winner} takes {in_ms(best.cost):.3g} ms"
    is_tie = lost_a_tie(timing.cost, best.cost)
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


def _raised(each: Tried, error: BaseException) -> Tried:
    """Return a participant that raised in a sample or was refused, without its engine."""
    message = f"raised when it was measured on the first inputs: {first_line(text_of(error))}"
    refusal = Refusal(Status.FAILED, Reason.RAISED_AT_RUNTIME, message)
    if isinstance(error, Refusal):
        refusal = error
    ended = refusal.status, refusal.reason, text_of(refusal)
    return Tried(each.attempt.raised(*ended, error), None, error)


def _timed(each: Tried, timing: str | dict[str, Any]) -> Tried:
    return dataclasses.replace(each, attempt=each.attempt.timed(timing))
