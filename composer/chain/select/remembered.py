"""Uses the winner of an earlier benchmark of this graph, or runs a benchmark now.

If a verdict is remembered, only its winner is tried: no other candidate is built, probed or
imported. The winner is proven and verified like any candidate. If it is not accepted, the verdict
is forgotten and the other candidates are measured.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC
from typing import Any

from composer.chain import select
from composer.chain.failures import REMEDY
from composer.chain.select import choice
from composer.chain.select.choice import Made, Tried
from composer.chain.select.rules import lost_a_tie
from composer.chain.select.verdict import CandidateRecord, Verdict
from composer.chain.select.verdicts import Recalled, VerdictCache
from composer.errors import Refusal
from composer.records import Attempt, GraphRequest, Outcome, Reason, Status
from composer.system.memory import free_memory


def fastest(
    trial: Callable[[int, int], Tried],
    tries: Callable[[Mapping[int, Tried]], Iterator[Tried]],
    fallback: Callable[[], Made],
    request: GraphRequest,
    benchmark: select.Benchmark,
    cache: VerdictCache | None,
) -> Outcome:
    """Choose the winner of a remembered verdict, or of a new benchmark, and remember that one.

    Args:
        trial: Tries the candidate at a place of the chain, given how many of the first products
            have to stay in float32.
        tries: Tries the chain, except the candidates that were tried already, given by place.
        fallback: Makes the eager fallback.
        request: The graph and the inputs to measure with.
        benchmark: The policy's settings for the measurement.
        cache: The cache of verdicts on this graph; ``None`` if none is remembered.
    """
    done: dict[int, Tried] = {}
    recalled = cache.recall() if cache else None
    if cache and recalled:
        winner = recalled.verdict.winner
        if winner is None:
            return _outcome(recalled, choice.fallback_of(fallback()))
        tried = trial(winner, recalled.verdict.candidates[winner].products_in_fp32)
        if tried.compiled is not None:
            return _outcome(recalled, tried)
        cache.forget()
        done[winner] = tried
    outcome = choice.fastest(tries(done), fallback, request, benchmark)
    free_memory()  # of those that lost
    if cache:
        cache.keep(outcome)
    return outcome


def _outcome(recalled: Recalled, serves: Tried) -> Outcome:
    """Return the outcome of the remembered benchmark, with the winner's attempt of now."""
    made = [_remembered(each, recalled) for each in recalled.verdict.candidates]
    winner = recalled.verdict.winner
    if winner is not None:
        timing = _timing(recalled.verdict.candidates[winner], recalled)
        made[winner] = Tried(serves.attempt.timed(timing), None)
    return choice.outcome_of(made, serves, ranking=recalled.verdict.ranking)


def _remembered(each: CandidateRecord, recalled: Recalled) -> Tried:
    """Return the result of a candidate that is not built now: it was slower, or not accepted."""
    attempt = functools.partial(
        Attempt,
        each.backend,
        seconds=0.0,
        engine={"precision": each.precision} if each.precision else {},
        precision=each.precision,
        products_in_fp32=each.products_in_fp32,
    )
    if each.timing:
        slower = attempt(Status.NOT_CHOSEN, Reason.SLOWER, _slower(each, recalled.verdict))
        return Tried(slower.timed(_timing(each, recalled)), None)
    message = _refused(each, recalled.verdict)
    refusal = Refusal(Status.SKIPPED, each.reason or Reason.POLICY, message)
    return Tried(attempt(refusal.status, refusal.reason, message), None, refusal)


def _timing(each: CandidateRecord, recalled: Recalled) -> dict[str, Any]:
    """Return the remembered times; measuring them took no time now."""
    measured = recalled.verdict.measured.astimezone(UTC).isoformat(timespec="seconds")
    now = {"seconds": 0.0, "measured": measured, "remembered_in": recalled.source}
    return {**each.figures, **now}


def _slower(each: CandidateRecord, verdict: Verdict) -> str:
    best = verdict.best
    message = f"{each.milliseconds:.3g} ms a call"
    if "build_ms" in each.figures:
        message += ", its build counted"
    message += f"; {best.who} takes {best.milliseconds:.3g} ms, as measured on {_date(verdict)}"
    is_tie = "mib" not in each.figures and lost_a_tie(each.milliseconds, best.milliseconds)
    return choice.with_circumstances(message, is_tie=is_tie, under_load=verdict.under_load)


def _refused(each: CandidateRecord, verdict: Verdict) -> str:
    if each.reason is Reason.POLICY:
        return each.message
    # What failed at a cost is kept among failures as well, and would be skipped for that again.
    remedy = "`composer cache clear verdicts failures` has it tried again"
    when, message = f"when it was tried on {_date(verdict)}", each.message.removesuffix(REMEDY)
    return f"{each.status} ({each.reason}) {when}: {message}; {remedy}"


def _date(verdict: Verdict) -> str:
    return f"{verdict.measured.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
