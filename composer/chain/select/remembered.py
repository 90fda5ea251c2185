"""Uses the winner of an earlier benchmark of this graph, or runs a benchmark now.

If a verdict is remembered, only its winner is tried: no other candidate is built, probed or
imported. The winner is proven and verified like any candidate. If it is not accepted, the verdict
is forgotten and the other candidates are measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from datetime import UTC
from typing import Any

from composer.chain import select
from composer.chain.failures import REMEDY
from composer.chain.select import choice
from composer.chain.select.choice import LOST_A_TIE, UNDER_LOAD, Made, Tried
from composer.chain.select.rules import lost_a_tie
from composer.chain.select.verdict import CandidateRecord
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
    verdict, made = recalled.verdict, list[Tried]()
    for place, each in enumerate(verdict.candidates):
        if place == verdict.winner:
            made.append(Tried(serves.attempt.timed(_timing(each, recalled)), None))
        elif each.timing:
            said = _beaten(each, recalled)
            slower = _of_then(each, Status.NOT_CHOSEN, Reason.SLOWER, said, recalled)
            made.append(Tried(slower, None))
        else:
            what = _refused(each, recalled)
            refusal = Refusal(Status.SKIPPED, each.reason or Reason.POLICY, what)
            skipped = _of_then(each, refusal.status, refusal.reason, what, recalled)
            made.append(Tried(skipped, None, refusal))
    return choice.outcome_of(made, serves, ranking=verdict.ranking)


def _of_then(
    each: CandidateRecord, status: Status, reason: Reason, message: str, recalled: Recalled
) -> Attempt:
    """Return the remembered attempt of a candidate that is not built now."""
    attempt = Attempt(
        *(each.backend, status, reason, message, 0.0),
        engine={"precision": each.precision} if each.precision else {},
        precision=each.precision,
        products_in_fp32=each.products_in_fp32,
    )
    return attempt.timed(_timing(each, recalled)) if each.timing else attempt


def _timing(each: CandidateRecord, recalled: Recalled) -> dict[str, Any]:
    """Return the remembered times; measuring them took no time now."""
    measured = recalled.verdict.measured.astimezone(UTC).isoformat(timespec="seconds")
    now = {"seconds": 0.0, "measured": measured, "remembered_in": recalled.source}
    return {**(each.timing or {}), **now}


def _beaten(each: CandidateRecord, recalled: Recalled) -> str:
    counted = ", its build counted" if "build_ms" in (each.timing or {}) else ""
    best = f"{recalled.verdict.serves} takes {recalled.verdict.milliseconds:.3g} ms"
    weighed = "mib" in (each.timing or {})
    tied = not weighed and lost_a_tie(each.milliseconds, recalled.verdict.milliseconds)
    when = f"as measured on {_date(recalled)}{LOST_A_TIE if tied else ''}"
    loaded = UNDER_LOAD if recalled.verdict.under_load else ""
    return f"{each.milliseconds:.3g} ms a call{counted}; {best}, {when}{loaded}"


def _refused(each: CandidateRecord, recalled: Recalled) -> str:
    if each.reason is Reason.POLICY:
        return each.message
    # What failed at a cost is kept among failures as well, and would be skipped for that again.
    remedy = "`composer cache clear verdicts failures` has it tried again"
    then, said = f"when it was tried on {_date(recalled)}", each.message.removesuffix(REMEDY)
    return f"{each.status} ({each.reason}) {then}: {said}; {remedy}"


def _date(recalled: Recalled) -> str:
    return f"{recalled.verdict.measured.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
